// What Python sees. Every argument is checked here, so that nothing behind these functions can be given wrong shapes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "encoder.h"
#include "exits.h"
#include "instruction_set.h"

namespace nb = nanobind;
using namespace offramp;

namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>;
using IntegersOut = nb::ndarray<std::int64_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int kMostThreads = 1024;

template <class Array>
std::string shape_of(const Array& array) {
  std::string shape = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) shape += (i ? ", " : "") + std::to_string(array.shape(i));
  return shape + "]";
}

template <class Array>
void expect_shape(const Array& array, const std::vector<std::size_t>& shape, const char* name) {
  bool equal = array.ndim() == shape.size();
  for (std::size_t i = 0; equal && i < shape.size(); ++i) equal = array.shape(i) == shape[i];
  if (equal) return;
  std::string wanted = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) wanted += (i ? ", " : "") + std::to_string(shape[i]);
  throw std::invalid_argument(std::string(name) + " must have the shape " + wanted + "], not " + shape_of(array));
}

template <class Array>
void expect_matrix(const Array& array, const char* name) {
  if (array.ndim() != 2 || array.shape(0) == 0 || array.shape(1) == 0)
    throw std::invalid_argument(std::string(name) + " must be a matrix with rows and columns, not " + shape_of(array));
}

Norm make_norm(const Floats& weight, const Floats& bias, float epsilon, std::size_t width, const char* name) {
  expect_shape(weight, {width}, name);
  expect_shape(bias, {width}, name);
  Norm norm;
  norm.weight.assign(weight.data(), weight.data() + width);
  norm.bias.assign(bias.data(), bias.data() + width);
  norm.epsilon = epsilon;
  return norm;
}

// A matrix with what keeps its memory alive.
struct PyLinear {
  std::shared_ptr<const Linear> linear;
  Bytes packed;

  PyLinear(Bytes bytes, std::size_t outputs, std::size_t inputs, const std::string& precision,
           const std::optional<Floats>& bias)
      : packed(std::move(bytes)) {
    const Precision parsed = parse_precision(precision);
    constexpr std::size_t kMost = 1 << 24;
    if (outputs == 0 || inputs == 0 || outputs > kMost || inputs > 65536)
      throw std::invalid_argument("a matrix must have at least one output and 1 to 65536 inputs");
    expect_shape(packed, {Linear::packed_size(parsed, outputs, inputs)}, "packed weights");
    if (reinterpret_cast<std::uintptr_t>(packed.data()) % alignof(float) != 0)
      throw std::invalid_argument("packed weights must be aligned to four bytes");
    if (bias) expect_shape(*bias, {outputs}, "a bias");
    linear = std::make_shared<Linear>(parsed, outputs, inputs, packed.data(), bias ? bias->data() : nullptr);
  }
};

std::size_t packed_size(const std::string& precision, std::size_t outputs, std::size_t inputs) {
  return Linear::packed_size(parse_precision(precision), outputs, inputs);
}

void pack(const Floats& weights, const std::string& precision, BytesOut packed) {
  expect_matrix(weights, "weights");
  const Precision parsed = parse_precision(precision);
  expect_shape(packed, {Linear::packed_size(parsed, weights.shape(0), weights.shape(1))}, "packed weights");
  nb::gil_scoped_release release;
  Linear::pack(parsed, weights.data(), weights.shape(0), weights.shape(1), packed.data());
}

struct PyHead {
  std::shared_ptr<Head> head = std::make_shared<Head>();
  std::vector<nb::object> kept_alive;
  std::size_t table_columns = 0;
  bool has_bf16 = false;  // some matrix needs kernels that not every instruction set has
  std::size_t checked_hidden = 0, checked_vocabulary = 0;  // 0: not used yet

  // A head that ran does not change any more: another thread may be running it.
  void expect_unused() const {
    if (checked_hidden != 0) throw std::invalid_argument("a head that was used cannot be changed");
  }
  void add(bool to_tokens, HeadStep step) {
    expect_unused();
    (to_tokens ? head->token_steps : head->row_steps).push_back(std::move(step));
  }
  void add_linear(bool tokens, const Floats& weight, const std::optional<Floats>& bias, const std::string& activation,
                  const std::string& precision) {
    expect_matrix(weight, "the weight of a head");
    if (bias) expect_shape(*bias, {weight.shape(0)}, "the bias of a head");
    const Activation parsed = parse_activation(activation);
    HeadStep step = linear_step(parse_precision(precision), weight.data(), bias ? bias->data() : nullptr,
                                weight.shape(0), weight.shape(1));
    step.activation = parsed;
    const bool bf16 = step.linear != nullptr && step.linear->precision() == Precision::bf16;
    add(tokens, std::move(step));
    has_bf16 = has_bf16 || bf16;
  }
  void add_norm(bool tokens, const Floats& weight, const Floats& bias, float epsilon) {
    if (weight.ndim() != 1) throw std::invalid_argument("the weight of a norm must be a vector");
    HeadStep step;
    step.kind = HeadStep::Kind::norm;
    step.norm = make_norm(weight, bias, epsilon, weight.shape(0), "the norm of a head");
    add(tokens, std::move(step));
  }
  void add_activation(bool tokens, const std::string& activation) {
    HeadStep step;
    step.kind = HeadStep::Kind::activation;
    step.activation = parse_activation(activation);
    add(tokens, std::move(step));
  }
  void add_attention(std::size_t heads) {
    HeadStep step;
    step.kind = HeadStep::Kind::attention;
    step.heads = heads;
    add(true, std::move(step));
  }
  void set_pools(const std::vector<std::string>& names) {
    expect_unused();
    head->pools.clear();
    for (const std::string& name : names) {
      if (name == "first") head->pools.push_back(Pool::first);
      else if (name == "mean") head->pools.push_back(Pool::mean);
      else if (name == "max") head->pools.push_back(Pool::max);
      else throw std::invalid_argument("unknown pooling '" + name + "'; use one of: first, mean, max");
    }
  }
  void set_bag_of_words(const Floats& words, const Floats& pairs, std::int64_t factor_here, std::int64_t factor_next,
                        const std::optional<Floats>& bias, float scale, bool by_root_of_length) {
    expect_matrix(words, "the table of words");
    expect_matrix(pairs, "the table of pairs");
    if (words.shape(1) != pairs.shape(1)) throw std::invalid_argument("both tables must have the same columns");
    if (factor_here < 0 || factor_next < 0 || factor_here > (1 << 30) || factor_next > (1 << 30))
      throw std::invalid_argument("the factors of a hash must lie between 0 and 2^30");
    expect_unused();
    BagOfWords bag;
    bag.words = words.data();
    bag.pairs = pairs.data();
    bag.word_count = words.shape(0);
    bag.pair_count = pairs.shape(0);
    bag.factor_here = factor_here;
    bag.factor_next = factor_next;
    bag.scale = scale;
    bag.by_root_of_length = by_root_of_length;
    if (bias) {
      expect_shape(*bias, {words.shape(1)}, "the bias of a bag of words");
      bag.bias.assign(bias->data(), bias->data() + bias->size());
    }
    table_columns = words.shape(1);
    kept_alive = {nb::cast(words), nb::cast(pairs)};
    head->bag_of_words = std::move(bag);
  }
  void check(std::size_t hidden, std::size_t vocabulary) {
    if (checked_hidden == hidden && checked_vocabulary == vocabulary) return;
    if (checked_hidden != 0) throw std::invalid_argument("a head that was used with one model does not fit another");
    head->check(hidden);
    if (head->bag_of_words) {
      if (table_columns != head->outputs())
        throw std::invalid_argument("the tables of a bag of words must have one column for each output");
      if (head->bag_of_words->word_count < vocabulary)
        throw std::invalid_argument("the table of words must have a row for every id of the vocabulary");
    }
    checked_hidden = hidden;
    checked_vocabulary = vocabulary;
  }
};

Measure parse_measure(const std::string& name) {
  if (name == "entropy") return Measure::entropy;
  if (name == "normalised_entropy") return Measure::normalised_entropy;
  if (name == "least_confidence") return Measure::least_confidence;
  if (name == "exit_unit") return Measure::exit_unit;
  if (name == "patience") return Measure::patience;
  throw std::invalid_argument("unknown measure '" + name + "'");
}

void measure_logits(const std::string& name, const Floats& logits, const std::optional<Floats>& temperatures,
                    FloatsOut values) {
  const Measure measure = parse_measure(name);
  if (measure == Measure::exit_unit || measure == Measure::patience)
    throw std::invalid_argument("the measure '" + name + "' is not one of logits alone");
  if (logits.ndim() != 2 || logits.shape(1) == 0)
    throw std::invalid_argument("logits must be a matrix with columns, not " + shape_of(logits));
  const std::size_t rows = logits.shape(0), outputs = logits.shape(1);
  if (temperatures) expect_shape(*temperatures, {rows}, "temperatures");
  expect_shape(values, {rows}, "values");
  for (std::size_t row = 0; row < rows; ++row) {
    const float temperature = temperatures ? temperatures->data()[row] : 1.0f;
    values.data()[row] = uncertainty(measure, logits.data() + row * outputs, outputs, temperature);
  }
}

struct PyRule {
  Rule rule;

  PyRule(const std::string& measure, const std::vector<std::size_t>& exits, const std::vector<double>& thresholds,
         const std::vector<float>& temperatures, std::int64_t patience, float tolerance, bool by_row) {
    rule.measure = parse_measure(measure);
    for (std::size_t i = 1; i < exits.size(); ++i)
      if (exits[i] <= exits[i - 1]) throw std::invalid_argument("exits must be given in ascending order");
    if (rule.measure != Measure::patience && !by_row && thresholds.size() != exits.size())
      throw std::invalid_argument("a rule needs one threshold for each exit");
    if (!temperatures.empty() && temperatures.size() != exits.size())
      throw std::invalid_argument("a rule needs one temperature for each exit, or none");
    rule.exits = exits;
    rule.thresholds = thresholds;
    rule.temperatures = temperatures;
    rule.patience = patience;
    rule.tolerance = tolerance;
    rule.by_row = by_row;
  }
};

// A copy of a column whose values were checked: the caller's array may change while the model runs.
std::vector<std::int64_t> checked_copy(const Integers& column, std::size_t tokens, std::int64_t limit,
                                       const char* name) {
  expect_shape(column, {tokens}, name);
  std::vector<std::int64_t> values(column.data(), column.data() + tokens);
  for (const std::int64_t value : values) {
    if (value < 0 || value >= limit)
      throw std::invalid_argument(std::string(name) + " must lie between 0 and " + std::to_string(limit - 1) +
                                  ", not " + std::to_string(value));
  }
  return values;
}

struct Tokens {
  std::vector<std::int64_t> ids, types, positions;
};

Starts make_starts(const Integers& lengths, std::int64_t smallest) {
  if (lengths.ndim() != 1) throw std::invalid_argument("lengths must be a vector");
  Starts starts = {0};
  starts.reserve(lengths.shape(0) + 1);
  for (std::size_t row = 0; row < lengths.shape(0); ++row) {
    const std::int64_t length = lengths.data()[row];
    if (length < smallest || length > (std::int64_t{1} << 31))
      throw std::invalid_argument("a row must have at least " + std::to_string(smallest) + " tokens, not " +
                                  std::to_string(length));
    starts.push_back(starts.back() + static_cast<std::size_t>(length));
  }
  return starts;
}

class PyEncoder {
 public:
  PyEncoder(std::size_t hidden, int threads, const std::string& instruction_set, const Floats& words,
            const Floats& positions, const std::optional<Floats>& types, std::size_t first_position,
            const Floats& norm_weight, const Floats& norm_bias, float norm_epsilon, const PyLinear* projection)
      : set_(find_instruction_set(instruction_set)) {
    if (hidden == 0 || hidden > 65536) throw std::invalid_argument("the width of states must lie between 1 and 65536");
    if (threads < 1 || threads > kMostThreads)
      throw std::invalid_argument("threads must lie between 1 and " + std::to_string(kMostThreads));
    expect_matrix(words, "the table of words");
    expect_matrix(positions, "the table of positions");
    Embeddings e;
    e.width = words.shape(1);
    if (positions.shape(1) != e.width || (types && (types->ndim() != 2 || types->shape(1) != e.width)))
      throw std::invalid_argument("all tables of embeddings must have the same width");
    if (first_position >= positions.shape(0)) throw std::invalid_argument("the first position lies outside its table");
    e.words = words.data();
    e.positions = positions.data();
    e.types = types ? types->data() : nullptr;
    e.word_count = words.shape(0);
    e.position_count = positions.shape(0);
    e.type_count = types ? types->shape(0) : 0;
    e.first_position = first_position;
    e.norm = make_norm(norm_weight, norm_bias, norm_epsilon, e.width, "the norm of the embeddings");
    keep(words);
    keep(positions);
    if (types) keep(*types);
    if (projection != nullptr) {
      if (projection->linear->inputs() != e.width || projection->linear->outputs() != hidden)
        throw std::invalid_argument("the projection of embeddings must lead from their width to that of states");
      check_precision(*projection->linear);
      e.projection = std::make_unique<Linear>(*projection->linear);
      keep(projection->packed);
    } else if (e.width != hidden) {
      throw std::invalid_argument("embeddings of another width than the states need a projection");
    }
    encoder_ = std::make_unique<Encoder>(hidden, threads, set_.kernels(), std::move(e));
  }

  void add_layer(std::size_t heads, std::size_t head_width, const PyLinear& query_key_value, const PyLinear& out,
                 const PyLinear& up, const PyLinear& down, const std::string& activation, const Floats& attention_weight,
                 const Floats& attention_bias, float attention_epsilon, const Floats& feed_weight,
                 const Floats& feed_bias, float feed_epsilon, const std::optional<Floats>& distance_bias) {
    if (used_) throw std::invalid_argument("a model that was used cannot be changed");
    const std::size_t hidden = encoder_->hidden(), inner = heads * head_width;
    if (heads == 0 || head_width == 0 || heads > 65536 || head_width > 65536)
      throw std::invalid_argument("a layer must have at least one head of at least one column");
    const auto expect = [](const PyLinear& matrix, std::size_t outputs, std::size_t inputs, const char* name) {
      if (matrix.linear->outputs() != outputs || matrix.linear->inputs() != inputs)
        throw std::invalid_argument(std::string(name) + " must be [" + std::to_string(outputs) + ", " +
                                    std::to_string(inputs) + "]");
      };
    expect(query_key_value, 3 * round_up(inner, kPanel), hidden, "queries, keys and values");
    expect(out, hidden, inner, "the output projection");
    expect(up, up.linear->outputs(), hidden, "the first feed-forward matrix");
    expect(down, hidden, up.linear->outputs(), "the second feed-forward matrix");
    for (const PyLinear* matrix : {&query_key_value, &out, &up, &down}) {
      check_precision(*matrix->linear);
      keep(matrix->packed);
    }
    Layer layer;
    layer.heads = heads;
    layer.head_width = head_width;
    layer.query_key_value = query_key_value.linear;
    layer.out = out.linear;
    layer.up = up.linear;
    layer.down = down.linear;
    layer.activation = parse_activation(activation);
    layer.attention_norm = make_norm(attention_weight, attention_bias, attention_epsilon, hidden, "a norm");
    layer.feed_norm = make_norm(feed_weight, feed_bias, feed_epsilon, hidden, "a norm");
    if (distance_bias) {
      if (distance_bias->ndim() != 2 || distance_bias->shape(1) % 2 == 0)
        throw std::invalid_argument("a bias of distances needs an odd number of them, from -reach to reach");
      expect_shape(*distance_bias, {heads, distance_bias->shape(1)}, "the bias of distances");
      layer.distance_bias.assign(distance_bias->data(), distance_bias->data() + distance_bias->size());
      layer.reach = distance_bias->shape(1) / 2;
      counts_distances_ = true;
    }
    encoder_->add_layer(std::move(layer));
  }

  std::string instruction_set() const { return set_.name; }
  int threads() const { return encoder_->threads().threads(); }
  std::size_t depth() const { return encoder_->depth(); }

  // Embeddings (where ids are given) and layers first … last; states [tokens, hidden] are read unless ids are given.
  void run_layers(std::size_t first, std::size_t last, const Integers& lengths, const std::optional<Integers>& ids,
                  const std::optional<Integers>& types, const std::optional<Integers>& positions,
                  const std::optional<Floats>& states, std::optional<FloatsOut> output,
                  const std::optional<PyHead*>& head, std::optional<FloatsOut> logits) {
    const Starts starts = make_starts(lengths, 1);
    const std::size_t tokens = starts.back(), hidden = encoder_->hidden(), rows = starts.size() - 1;
    const bool embeds = first == 0;
    if (last > depth() || (first > last && last + 1 != first))
      throw std::invalid_argument("layers " + std::to_string(first) + " to " + std::to_string(last) +
                                  " do not exist in a model of " + std::to_string(depth()));
    if (embeds != !states.has_value()) throw std::invalid_argument("states are given where no embeddings are computed");
    const Tokens token = checked_tokens(ids, types, positions, tokens);
    const bool reads_words = head && (*head)->head->bag_of_words;
    if ((embeds || reads_words) && token.ids.empty() && tokens > 0) throw std::invalid_argument("ids of the tokens are needed");
    if ((embeds || reads_words || counts_distances_) && token.positions.empty() && tokens > 0)
      throw std::invalid_argument("positions of the tokens are needed");
    if (embeds) expect_types(token, tokens);
    if (states) expect_shape(*states, {tokens, hidden}, "states");
    if (output) expect_shape(*output, {tokens, hidden}, "the output");
    if (head.has_value() != logits.has_value()) throw std::invalid_argument("a head and its logits are given together");
    PyHead* const own = head ? *head : nullptr;
    if (own != nullptr) {
      check_head(*own);
      expect_shape(*logits, {rows, own->head->outputs()}, "logits");
    }
    if (rows == 0) return;
    const std::int64_t* const position = token.positions.empty() ? nullptr : token.positions.data();
    used_ = true;
    float* const to = output ? output->data() : nullptr;
    float* const logits_to = logits ? logits->data() : nullptr;
    const float* const from = states ? states->data() : nullptr;
    nb::gil_scoped_release release;
    ThreadTeam team(encoder_->threads());
    Context context = {team, encoder_->kernels(), workspace()};
    const std::size_t stride = encoder_->stride();
    float* const work = context.work.states.at_least(tokens * stride);
    if (embeds) encoder_->embed(context, token.ids.data(), token.types.data(), position, tokens, work);
    else copy_in(from, tokens, work);
    for (std::size_t layer = embeds ? 1 : first; layer <= last; ++layer) encoder_->run_layer(context, layer, starts, position, work);
    if (to != nullptr) copy_out(work, tokens, to);
    if (own != nullptr) {
      Batch batch;
      batch.ids = token.ids.data();
      batch.positions = position;
      batch.id_starts = starts.data();
      batch.starts = starts;
      batch.states = work;
      batch.hidden = hidden;
      batch.stride = stride;
      std::vector<std::size_t> all(rows);
      for (std::size_t row = 0; row < rows; ++row) all[row] = row;
      evaluate(context, *own->head, batch, all, logits_to);
    }
  }

  void attend(std::size_t layer, const Floats& queries, const Floats& keys, const Integers& query_lengths,
              const Integers& key_lengths, const std::optional<Integers>& query_positions,
              const std::optional<Integers>& key_positions, FloatsOut output, std::optional<FloatsOut> columns,
              std::optional<FloatsOut> diagonal, bool same) {
    check_layer(layer);
    const Starts query_starts = make_starts(query_lengths, 0), key_starts = make_starts(key_lengths, 1);
    if (query_starts.size() != key_starts.size()) throw std::invalid_argument("queries and keys must have equal rows");
    const std::size_t query_count = query_starts.back(), key_count = key_starts.back(), hidden = encoder_->hidden();
    expect_shape(queries, {query_count, hidden}, "queries");
    expect_shape(keys, {key_count, hidden}, "keys");
    expect_shape(output, {query_count, hidden}, "the output");
    if (same && queries.data() != keys.data()) throw std::invalid_argument("queries that are the keys are one array");
    for (std::size_t row = 0; row + 1 < key_starts.size(); ++row) {
      const std::size_t own_queries = query_starts[row + 1] - query_starts[row];
      const std::size_t own_keys = key_starts[row + 1] - key_starts[row];
      if (same ? own_queries != own_keys : own_queries > own_keys)
        throw std::invalid_argument("a row may not have more queries than keys, and as many where they are the same");
    }
    if (columns.has_value() != diagonal.has_value()) throw std::invalid_argument("scores are columns and a diagonal");
    const bool reads_positions = counts_distances_ || (columns && !same);
    std::vector<std::int64_t> query_place, key_place;
    if (reads_positions) {
      if (!query_positions || !key_positions) throw std::invalid_argument("positions of queries and keys are needed");
      const std::int64_t any = std::int64_t{1} << 31;
      query_place = checked_copy(*query_positions, query_count, any, "positions of queries");
      key_place = checked_copy(*key_positions, key_count, any, "positions of keys");
    }
    if (columns) {
      expect_shape(*columns, {key_count}, "scores");
      expect_shape(*diagonal, {key_count}, "scores");
    }
    if (key_count == 0) return;
    const AttentionScores scores = {columns ? columns->data() : nullptr, diagonal ? diagonal->data() : nullptr};
    const bool scored = columns.has_value();
    used_ = true;
    float* const to = output.data();
    const float *const query_from = queries.data(), *const key_from = keys.data();
    nb::gil_scoped_release release;
    ThreadTeam team(encoder_->threads());
    Context context = {team, encoder_->kernels(), workspace()};
    const std::size_t stride = encoder_->stride();
    float* const key_states = context.work.states.at_least((key_count + (same ? 0 : query_count)) * stride);
    float* const query_states = same ? key_states : key_states + key_count * stride;
    copy_in(key_from, key_count, key_states);
    if (!same) copy_in(query_from, query_count, query_states);
    float* const result = context.work.other_states.at_least(query_count * stride + 1);
    encoder_->attend(context, layer, {query_states, key_states, same, query_starts, key_starts,
                                      reads_positions ? query_place.data() : nullptr,
                                      reads_positions ? key_place.data() : nullptr, result,
                                      scored ? &scores : nullptr});
    copy_out(result, query_count, to);
  }

  void feed(std::size_t layer, const Floats& states, FloatsOut output) {
    check_layer(layer);
    if (states.ndim() != 2) throw std::invalid_argument("states must be a matrix, not " + shape_of(states));
    const std::size_t tokens = states.shape(0);
    expect_shape(states, {tokens, encoder_->hidden()}, "states");
    expect_shape(output, {tokens, encoder_->hidden()}, "the output");
    if (tokens == 0) return;
    const float* const from = states.data();
    float* const to = output.data();
    used_ = true;
    nb::gil_scoped_release release;
    ThreadTeam team(encoder_->threads());
    Context context = {team, encoder_->kernels(), workspace()};
    const std::size_t stride = encoder_->stride();
    float* const work = context.work.states.at_least(tokens * stride);
    float* const result = context.work.other_states.at_least(tokens * stride);
    copy_in(from, tokens, work);
    encoder_->feed(context, layer, work, tokens, result);
    copy_out(result, tokens, to);
  }

  void run_rule(const PyRule& given, const std::vector<PyHead*>& heads, PyHead* exit_unit, const Integers& ids,
                const std::optional<Integers>& types, const Integers& positions, const Integers& lengths,
                const std::optional<Floats>& thresholds, const std::optional<Floats>& temperatures,
                const std::optional<Integers>& patience, FloatsOut logits, IntegersOut exit_layer) {
    const Rule& rule = given.rule;
    Input input;
    input.starts = make_starts(lengths, 1);
    const std::size_t rows = input.starts.size() - 1;
    const Tokens token = checked_tokens(ids, types, positions, input.starts.back());
    expect_types(token, input.starts.back());
    if (heads.size() != depth() + 1) throw std::invalid_argument("one head (or None) is needed for each layer, and exit 0");
    if (!rule.exits.empty() && rule.exits.back() >= depth()) throw std::invalid_argument("an exit lies above the model");
    std::vector<std::shared_ptr<const Head>> own(depth() + 1);
    const auto use = [&](std::size_t layer) {
      if (heads[layer] == nullptr) throw std::invalid_argument("layer " + std::to_string(layer) + " has no head");
      check_head(*heads[layer]);
      own[layer] = heads[layer]->head;
    };
    use(depth());
    const std::size_t outputs = own[depth()]->outputs();
    for (std::size_t number = 0; number < rule.exits.size(); ++number) {
      if (!rule.consults(number)) continue;
      use(rule.exits[number]);
      if (own[rule.exits[number]]->outputs() != outputs) throw std::invalid_argument("all heads need the same outputs");
    }
    bool consults = false;
    for (std::size_t number = 0; number < rule.exits.size(); ++number) consults = consults || rule.consults(number);
    if (rule.measure == Measure::exit_unit && consults) {
      if (exit_unit == nullptr) throw std::invalid_argument("this rule needs an exit unit");
      check_head(*exit_unit);
      if (exit_unit->head->outputs() != 1) throw std::invalid_argument("an exit unit has one output");
    }
    RowSettings settings;
    if (rule.by_row) {
      if (rule.measure == Measure::patience) {
        if (!patience) throw std::invalid_argument("this rule reads the patience of each row");
        expect_shape(*patience, {rows}, "patience");
        settings.patience = patience->data();
      } else {
        if (!thresholds) throw std::invalid_argument("this rule reads the thresholds of each row");
        expect_shape(*thresholds, {rows, rule.exits.size()}, "thresholds");
        settings.thresholds = thresholds->data();
        if (temperatures) {
          expect_shape(*temperatures, {rows, rule.exits.size()}, "temperatures");
          settings.temperatures = temperatures->data();
        }
      }
    }
    expect_shape(logits, {rows, outputs}, "logits");
    expect_shape(exit_layer, {rows}, "exit layers");
    if (rows == 0) return;
    input.ids = token.ids.data();
    input.types = token.types.data();
    input.positions = token.positions.data();
    used_ = true;
    float* const logits_to = logits.data();
    std::int64_t* const layers_to = exit_layer.data();
    const Head* const unit = exit_unit == nullptr ? nullptr : exit_unit->head.get();
    nb::gil_scoped_release release;
    ThreadTeam team(encoder_->threads());
    Context context = {team, encoder_->kernels(), workspace()};
    offramp::run_rule(*encoder_, context, rule, settings, own, unit, input, logits_to, layers_to);
  }

 private:
  template <class Array>
  void keep(const Array& array) {
    kept_alive_.push_back(nb::cast(array));
  }
  void check_precision(const Linear& linear) const { expect_kernels(linear.precision() == Precision::bf16); }
  void check_head(PyHead& head) const {
    head.check(encoder_->hidden(), encoder_->embeddings().word_count);
    expect_kernels(head.has_bf16);
  }
  void expect_kernels(bool bf16) const {
    if (bf16 && set_.kernels().product_bf16 == nullptr)
      throw std::invalid_argument(std::string("the instruction set ") + set_.name + " has no bf16 products");
  }
  void check_layer(std::size_t layer) const {
    if (layer < 1 || layer > depth())
      throw std::invalid_argument("layer " + std::to_string(layer) + " does not exist in a model of " +
                                  std::to_string(depth()));
  }
  Tokens checked_tokens(const std::optional<Integers>& ids, const std::optional<Integers>& types,
                        const std::optional<Integers>& positions, std::size_t tokens) const {
    const Embeddings& e = encoder_->embeddings();
    Tokens copied;
    if (ids) copied.ids = checked_copy(*ids, tokens, static_cast<std::int64_t>(e.word_count), "ids");
    if (positions) {
      const std::size_t longest = e.position_count - e.first_position;
      copied.positions = checked_copy(*positions, tokens, static_cast<std::int64_t>(longest), "positions");
    }
    if (types && e.types != nullptr)
      copied.types = checked_copy(*types, tokens, static_cast<std::int64_t>(e.type_count), "types");
    return copied;
  }
  void expect_types(const Tokens& token, std::size_t tokens) const {
    if (encoder_->embeddings().types != nullptr && token.types.size() != tokens)
      throw std::invalid_argument("types of the tokens are needed");
  }
  void copy_in(const float* from, std::size_t tokens, float* to) const {
    const std::size_t hidden = encoder_->hidden(), stride = encoder_->stride();
    for (std::size_t token = 0; token < tokens; ++token)
      std::memcpy(to + token * stride, from + token * hidden, hidden * sizeof(float));
    clear_filler(to, tokens, hidden, stride);
  }
  void copy_out(const float* from, std::size_t tokens, float* to) const {
    const std::size_t hidden = encoder_->hidden(), stride = encoder_->stride();
    for (std::size_t token = 0; token < tokens; ++token)
      std::memcpy(to + token * hidden, from + token * stride, hidden * sizeof(float));
  }

  InstructionSet set_;
  bool used_ = false;  // layers are fixed: another thread may be running them
  bool counts_distances_ = false;
  std::unique_ptr<Encoder> encoder_;
  std::vector<nb::object> kept_alive_;
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels and the adaptive loop of Offramp in C++; offramp.engines.native is what uses them.";
  nb::set_leak_warnings(false);  // a model that lives until Python ends is no mistake
  m.attr("__version__") = OFFRAMP_NATIVE_VERSION;
  m.attr("PANEL") = kPanel;
  m.attr("PACKED_LAYOUT") = kPackedLayout;
  m.attr("MOST_THREADS") = kMostThreads;
  m.attr("INTERFACE") = 2;  // raised when a function here takes other arguments; offramp.engines.native compares it
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const InstructionSet& set : available_instruction_sets()) names.emplace_back(set.name);
    return names;
  }, "Return the names of the instruction sets that this processor has, the plainest first.");
  m.def("packed_size", &packed_size, nb::arg("precision"), nb::arg("outputs"), nb::arg("inputs"),
        "Return the bytes that a packed matrix takes.");
  m.def("pack", &pack, nb::arg("weights"), nb::arg("precision"), nb::arg("packed").noconvert(),
        "Pack a matrix [outputs, inputs] into an array of packed_size bytes.");
  m.def("measure_logits", &measure_logits, nb::arg("measure"), nb::arg("logits"), nb::arg("temperatures").none(),
        nb::arg("values").noconvert(), "Write the uncertainty of each row of logits, as rules measure it.");
  nb::class_<PyLinear>(m, "Linear", "A matrix with packed weights.")
      .def(nb::init<Bytes, std::size_t, std::size_t, const std::string&, const std::optional<Floats>&>(),
           nb::arg("packed").noconvert(), nb::arg("outputs"), nb::arg("inputs"), nb::arg("precision"), nb::arg("bias").none());
  nb::class_<PyHead>(m, "Head", "An exit head: steps on tokens, pooling, steps on rows, and tables of words.")
      .def(nb::init<>())
      .def("add_linear", &PyHead::add_linear, nb::arg("tokens"), nb::arg("weight"), nb::arg("bias").none(),
           nb::arg("activation") = "", nb::arg("precision") = "fp32")
      .def("add_norm", &PyHead::add_norm, nb::arg("tokens"), nb::arg("weight"), nb::arg("bias"), nb::arg("epsilon"))
      .def("add_activation", &PyHead::add_activation, nb::arg("tokens"), nb::arg("activation"))
      .def("add_attention", &PyHead::add_attention, nb::arg("heads"))
      .def("set_pools", &PyHead::set_pools, nb::arg("names"))
      .def("set_bag_of_words", &PyHead::set_bag_of_words, nb::arg("words"), nb::arg("pairs"), nb::arg("factor_here"),
           nb::arg("factor_next"), nb::arg("bias").none(), nb::arg("scale"), nb::arg("by_root_of_length"));
  nb::class_<PyRule>(m, "Rule", "When rows exit.")
      .def(nb::init<const std::string&, const std::vector<std::size_t>&, const std::vector<double>&,
                    const std::vector<float>&, std::int64_t, float, bool>(),
           nb::arg("measure"), nb::arg("exits"), nb::arg("thresholds"), nb::arg("temperatures"), nb::arg("patience"),
           nb::arg("tolerance"), nb::arg("by_row"));
  nb::class_<PyEncoder>(m, "Encoder", "Embeddings and layers of a model.")
      .def(nb::init<std::size_t, int, const std::string&, const Floats&, const Floats&, const std::optional<Floats>&,
                    std::size_t, const Floats&, const Floats&, float, const PyLinear*>(),
           nb::arg("hidden"), nb::arg("threads"), nb::arg("instruction_set"), nb::arg("words"), nb::arg("positions"),
           nb::arg("types").none(), nb::arg("first_position"), nb::arg("norm_weight"), nb::arg("norm_bias"),
           nb::arg("norm_epsilon"), nb::arg("projection").none())
      .def("add_layer", &PyEncoder::add_layer, nb::arg("heads"), nb::arg("head_width"), nb::arg("query_key_value"),
           nb::arg("out"), nb::arg("up"), nb::arg("down"), nb::arg("activation"), nb::arg("attention_weight"),
           nb::arg("attention_bias"), nb::arg("attention_epsilon"), nb::arg("feed_weight"), nb::arg("feed_bias"),
           nb::arg("feed_epsilon"), nb::arg("distance_bias").none() = nb::none())
      .def_prop_ro("instruction_set", &PyEncoder::instruction_set)
      .def_prop_ro("threads", &PyEncoder::threads)
      .def_prop_ro("depth", &PyEncoder::depth)
      .def("run_layers", &PyEncoder::run_layers, nb::arg("first"), nb::arg("last"), nb::arg("lengths"),
           nb::arg("ids").none() = nb::none(), nb::arg("types").none() = nb::none(),
           nb::arg("positions").none() = nb::none(), nb::arg("states").none() = nb::none(),
           nb::arg("output").noconvert().none() = nb::none(), nb::arg("head").none() = nb::none(),
           nb::arg("logits").noconvert().none() = nb::none())
      .def("attend", &PyEncoder::attend, nb::arg("layer"), nb::arg("queries"), nb::arg("keys"),
           nb::arg("query_lengths"), nb::arg("key_lengths"), nb::arg("query_positions").none() = nb::none(),
           nb::arg("key_positions").none() = nb::none(), nb::arg("output").noconvert(), nb::arg("columns").noconvert().none() = nb::none(),
           nb::arg("diagonal").noconvert().none() = nb::none(), nb::arg("same") = false)
      .def("feed", &PyEncoder::feed, nb::arg("layer"), nb::arg("states"), nb::arg("output").noconvert())
      .def("run_rule", &PyEncoder::run_rule, nb::arg("rule"), nb::arg("heads"), nb::arg("exit_unit").none(),
           nb::arg("ids"), nb::arg("types").none(), nb::arg("positions"), nb::arg("lengths"),
           nb::arg("thresholds").none() = nb::none(), nb::arg("temperatures").none() = nb::none(),
           nb::arg("patience").none() = nb::none(), nb::arg("logits").noconvert(), nb::arg("exit_layer").noconvert());
}

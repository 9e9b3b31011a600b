#include "exits.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace offramp {

namespace {

constexpr std::size_t kFewOutputs = 16;  // up to here dot products beat panels of 32 columns

std::size_t check_steps(const std::vector<HeadStep>& steps, std::size_t width, const char* where) {
  for (const HeadStep& step : steps) {
    std::size_t wanted = width, given = width;
    if (step.kind == HeadStep::Kind::linear) {
      wanted = step.inputs;
      width = step.outputs;
    } else if (step.kind == HeadStep::Kind::norm) {
      wanted = step.norm.weight.size();
    } else if (step.kind == HeadStep::Kind::attention) {
      if (step.heads == 0 || width % (3 * step.heads) != 0)
        throw std::invalid_argument(std::string("attention in ") + where + " needs three equal parts of whole heads, " +
                                    std::to_string(width) + " columns were given");
      width /= 3;
    }
    if (wanted != given)
      throw std::invalid_argument(std::string("a step in ") + where + " takes " + std::to_string(wanted) +
                                  " columns, " + std::to_string(given) + " were given");
  }
  return width;
}

// Runs one step on rows of `width` columns. Input and output alternate between two buffers; returns the new width.
std::size_t run_step(Context& context, const HeadStep& step, std::size_t rows, std::size_t width, std::size_t stride,
                     const float*& current, std::size_t& current_stride, Buffer<float>& spare, const Starts* starts) {
  if (step.kind == HeadStep::Kind::linear) {
    const std::size_t new_stride = round_up(step.outputs, kPanel);
    float* const output = spare.at_least(rows * new_stride);
    if (step.linear != nullptr) {
      step.linear->apply(context.team, context.kernels, context.work.rounded, current, current_stride, rows,
                         {output, new_stride, step.activation});
    } else {
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t i = 0; i < step.outputs; ++i) {
          const float* const weights = step.few_rows.data() + i * step.inputs;
          const float product = context.kernels.dot(current + row * current_stride, weights, step.inputs);
          output[row * new_stride + i] = product + step.few_bias[i];
        }
        context.kernels.activate(step.activation, output + row * new_stride, step.outputs);
      }
    }
    current = output;
    current_stride = new_stride;
    return step.outputs;
  }
  if (step.kind == HeadStep::Kind::attention) {
    const std::size_t inner = width / 3, new_stride = round_up(inner, kPanel);
    float* const output = spare.at_least(rows * new_stride);
    clear_filler(output, rows, inner, new_stride);
    HeadsAttention heads = {};
    heads.queries = current;
    heads.keys = current + inner;
    heads.values = current + 2 * inner;
    heads.query_stride = heads.key_stride = current_stride;
    heads.heads = step.heads;
    heads.width = inner / step.heads;
    heads.same = true;
    heads.query_starts = heads.key_starts = starts->data();
    heads.rows = starts->size() - 1;
    heads.output = output;
    heads.output_stride = new_stride;
    attend_rows(context, heads);
    current = output;
    current_stride = new_stride;
    return inner;
  }
  float* const output = spare.at_least(rows * stride);
  for (std::size_t row = 0; row < rows; ++row) {
    const float* const from = current + row * current_stride;
    float* const to = output + row * stride;
    if (step.kind == HeadStep::Kind::norm) {
      context.kernels.layer_norm(from, width, step.norm.weight.data(), step.norm.bias.data(), step.norm.epsilon, to);
    } else {
      std::memcpy(to, from, width * sizeof(float));
      context.kernels.activate(step.activation, to, width);
    }
  }
  current = output;
  current_stride = stride;
  return width;
}

void pool_row(const Kernels& kernels, const std::vector<Pool>& pools, const float* states, std::size_t stride,
              std::size_t tokens, std::size_t width, float* features) {
  for (const Pool pool : pools) {
    std::memcpy(features, states, width * sizeof(float));
    if (pool == Pool::mean) {
      for (std::size_t token = 1; token < tokens; ++token) kernels.add_to(features, states + token * stride, width);
      const float count = static_cast<float>(tokens);
      for (std::size_t i = 0; i < width; ++i) features[i] /= count;
    } else if (pool == Pool::max) {
      for (std::size_t token = 1; token < tokens; ++token) kernels.max_to(features, states + token * stride, width);
    }
    features += width;
  }
}

void add_bag_of_words(const BagOfWords& bag, const std::int64_t* ids, const std::int64_t* positions,
                      std::size_t tokens, std::size_t outputs, float* logits, float* sums) {
  std::fill(sums, sums + outputs, 0.0f);
  for (std::size_t token = 0; token < tokens; ++token) {
    const float* const word = bag.words + ids[token] * outputs;
    const bool has_pair = token + 1 < tokens && positions[token + 1] == positions[token] + 1;
    if (!has_pair) {
      for (std::size_t i = 0; i < outputs; ++i) sums[i] += word[i];
      continue;
    }
    const std::int64_t buckets = static_cast<std::int64_t>(bag.pair_count);
    const std::int64_t place = (ids[token] * bag.factor_here % buckets + ids[token + 1] * bag.factor_next % buckets) % buckets;
    const float* const pair = bag.pairs + place * outputs;
    for (std::size_t i = 0; i < outputs; ++i) sums[i] += word[i] + pair[i];
  }
  const float scale = bag.by_root_of_length ? bag.scale / std::sqrt(static_cast<float>(tokens)) : bag.scale;
  for (std::size_t i = 0; i < outputs; ++i) {
    const float bias = bag.bias.empty() ? 0.0f : bag.bias[i];
    logits[i] = logits[i] + bias + sums[i] * scale;
  }
}

}  // namespace

HeadStep linear_step(Precision precision, const float* weights, const float* bias, std::size_t outputs,
                     std::size_t inputs) {
  HeadStep step;
  step.kind = HeadStep::Kind::linear;
  step.inputs = inputs;
  step.outputs = outputs;
  if (outputs <= kFewOutputs) {
    step.few_rows.assign(weights, weights + outputs * inputs);
    step.few_bias.assign(outputs, 0.0f);
    if (bias != nullptr) std::copy(bias, bias + outputs, step.few_bias.begin());
  } else {
    std::uint8_t* const packed = step.packed.at_least(Linear::packed_size(precision, outputs, inputs));
    Linear::pack(precision, weights, outputs, inputs, packed);
    step.linear = std::make_shared<Linear>(precision, outputs, inputs, packed, bias);
  }
  return step;
}

void Head::check(std::size_t hidden) {
  if (pools.empty()) throw std::invalid_argument("a head must pool its row in at least one way");
  std::size_t width = check_steps(token_steps, hidden, "a head's steps on tokens");
  for (const HeadStep& step : row_steps) {
    if (step.kind == HeadStep::Kind::attention)
      throw std::invalid_argument("a head attends over tokens, not over pooled features");
  }
  outputs_ = check_steps(row_steps, width * pools.size(), "a head's steps on rows");
  if (outputs_ == 0) throw std::invalid_argument("a head must have at least one output");
  if (bag_of_words && !bag_of_words->bias.empty() && bag_of_words->bias.size() != outputs_)
    throw std::invalid_argument("the bias of a bag of words must have one number for each output");
}

void evaluate(Context& context, const Head& head, const Batch& batch, const std::vector<std::size_t>& rows,
              float* logits) {
  const std::size_t count = rows.size();
  if (count == 0) return;
  Buffer<float>*front = &context.work.features, *back = &context.work.more_features;
  const float* states = batch.states;
  std::size_t width = batch.hidden, stride = batch.stride;
  Starts gathered;  // of the rows on which token steps ran
  if (!head.token_steps.empty()) {
    gathered.push_back(0);
    for (const std::size_t row : rows)
      gathered.push_back(gathered.back() + batch.starts[row + 1] - batch.starts[row]);
    const std::size_t tokens = gathered.back();
    if (count != batch.rows()) {
      float* const copy = back->at_least(tokens * stride);
      for (std::size_t i = 0; i < count; ++i) {
        const float* const from = batch.states + batch.starts[rows[i]] * stride;
        std::memcpy(copy + gathered[i] * stride, from, (gathered[i + 1] - gathered[i]) * stride * sizeof(float));
      }
      states = copy;
    }
    for (const HeadStep& step : head.token_steps) {
      const std::size_t own = round_up(width, kPanel);
      width = run_step(context, step, tokens, width, own, states, stride, *front, &gathered);
      std::swap(front, back);
    }
  }
  const std::size_t pooled = width * head.pools.size();
  std::size_t feature_stride = round_up(pooled, kPanel);
  float* const features = front->at_least(count * feature_stride);
  std::swap(front, back);
  context.team.for_each((count + 7) / 8, [&](std::size_t task) {
    for (std::size_t i = task * 8; i < std::min(count, task * 8 + 8); ++i) {
      const std::size_t first = gathered.empty() ? batch.starts[rows[i]] : gathered[i];
      const std::size_t tokens = batch.starts[rows[i] + 1] - batch.starts[rows[i]];
      float* const to = features + i * feature_stride;
      pool_row(context.kernels, head.pools, states + first * stride, stride, tokens, width, to);
    }
  });
  const float* current = features;
  std::size_t current_width = pooled;
  for (const HeadStep& step : head.row_steps) {
    const std::size_t own = round_up(current_width, kPanel);
    current_width = run_step(context, step, count, current_width, own, current, feature_stride, *front, nullptr);
    std::swap(front, back);
  }
  const std::size_t outputs = head.outputs();
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(logits + i * outputs, current + i * feature_stride, outputs * sizeof(float));
  if (head.bag_of_words) {
    float* const sums = front->at_least(outputs);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = rows[i], tokens = batch.starts[row + 1] - batch.starts[row];
      const std::size_t first = batch.id_starts[row];
      add_bag_of_words(*head.bag_of_words, batch.ids + first, batch.positions + first, tokens, outputs,
                       logits + i * outputs, sums);
    }
  }
}

float uncertainty(Measure measure, const float* logits, std::size_t count, float temperature) {
  float largest = logits[0] / temperature;
  for (std::size_t i = 1; i < count; ++i) largest = std::max(largest, logits[i] / temperature);
  float total = 0.0f;
  for (std::size_t i = 0; i < count; ++i) total += std::exp(logits[i] / temperature - largest);
  if (measure == Measure::least_confidence) return 1.0f - 1.0f / total;  // the best one's power is 1
  float entropy = 0.0f;
  std::size_t possible = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float share = std::exp(logits[i] / temperature - largest) / total;
    if (!(share <= 0.0f)) entropy -= share * std::log(share);  // NaN of NaN: such a row does not exit
    possible += std::isinf(logits[i]) && logits[i] < 0.0f ? 0 : 1;
  }
  if (measure == Measure::entropy) return entropy;
  return entropy / std::log(static_cast<float>(std::max<std::size_t>(2, possible)));
}

bool Rule::consults(std::size_t exit_number) const {
  if (by_row) return true;
  return measure == Measure::patience ? patience > 0 : thresholds[exit_number] > 0.0;
}

namespace {

// The place of the largest logit; NaN is larger than any number, as in torch.
std::size_t best_answer(const float* logits, std::size_t outputs) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < outputs && !std::isnan(logits[best]); ++i)
    if (std::isnan(logits[i]) || logits[i] > logits[best]) best = i;
  return best;
}

// Patience: whether two exits give the same answer. A single number is the same when it hardly moves.
bool same_answer(const float* before, const float* now, std::size_t outputs, float tolerance) {
  if (outputs == 1) return std::fabs(before[0] - now[0]) < tolerance;
  return best_answer(before, outputs) == best_answer(now, outputs);
}

}  // namespace

void run_rule(Encoder& encoder, Context& context, const Rule& rule, const RowSettings& settings,
              const std::vector<std::shared_ptr<const Head>>& heads, const Head* exit_unit, const Input& input,
              float* logits, std::int64_t* exit_layer) {
  const std::size_t depth = encoder.depth(), outputs = heads[depth]->outputs();
  const std::size_t stride = encoder.stride();
  Batch batch;
  batch.ids = input.ids;
  batch.positions = input.positions;
  batch.starts = input.starts;
  batch.hidden = encoder.hidden();
  batch.stride = stride;
  batch.states = context.work.states.at_least(input.starts.back() * stride);
  std::vector<std::size_t> id_starts(input.starts.begin(), input.starts.end() - 1);
  batch.id_starts = id_starts.data();
  encoder.embed(context, input.ids, input.types, input.positions, input.starts.back(), batch.states);

  std::vector<std::int64_t> positions(input.positions, input.positions + input.starts.back());  // of live tokens
  std::vector<std::size_t> origin(batch.rows()), all, leaving;
  for (std::size_t row = 0; row < origin.size(); ++row) origin[row] = row;
  std::vector<float> current(origin.size() * outputs), previous;  // logits of live rows, after this exit and the last
  std::vector<std::int64_t> streak(origin.size(), 0);
  std::size_t exit_number = 0;
  for (std::size_t layer = 0; layer <= depth && batch.rows() > 0; ++layer) {
    if (layer > 0) encoder.run_layer(context, layer, batch.starts, positions.data(), batch.states);
    const std::size_t rows = batch.rows();
    all.resize(rows);
    for (std::size_t row = 0; row < rows; ++row) all[row] = row;
    if (layer == depth) {
      evaluate(context, *heads[depth], batch, all, current.data());
      for (std::size_t row = 0; row < rows; ++row) {
        std::memcpy(logits + origin[row] * outputs, current.data() + row * outputs, outputs * sizeof(float));
        exit_layer[origin[row]] = static_cast<std::int64_t>(depth);
      }
      break;
    }
    if (exit_number == rule.exits.size() || rule.exits[exit_number] != layer) continue;
    const std::size_t number = exit_number++;
    if (!rule.consults(number)) continue;
    leaving.clear();
    if (rule.measure == Measure::exit_unit) {
      evaluate(context, *exit_unit, batch, all, current.data());
    } else {
      evaluate(context, *heads[layer], batch, all, current.data());
    }
    for (std::size_t row = 0; row < rows; ++row) {
      const float* const own = current.data() + row * outputs;
      const std::size_t place = origin[row] * rule.exits.size() + number;
      bool leaves;
      if (rule.measure == Measure::patience) {
        const bool same = !previous.empty() && same_answer(previous.data() + row * outputs, own, outputs, rule.tolerance);
        streak[row] = same ? streak[row] + 1 : 0;
        const std::int64_t needed = rule.by_row ? settings.patience[origin[row]] : rule.patience;
        leaves = needed > 0 && streak[row] >= needed;
      } else {
        float value;
        if (rule.measure == Measure::exit_unit) {
          value = current[row];
        } else {
          const float temperature = rule.by_row && settings.temperatures != nullptr ? settings.temperatures[place]
                                    : rule.temperatures.empty()                     ? 1.0f
                                                                                    : rule.temperatures[number];
          value = uncertainty(rule.measure, own, outputs, temperature);
        }
        // Always in single precision, as torch compares: a row may not leave elsewhere because others have settings
        // of their own.
        leaves = value < (rule.by_row ? settings.thresholds[place] : static_cast<float>(rule.thresholds[number]));
      }
      if (leaves) leaving.push_back(row);
    }
    if (!leaving.empty()) {
      std::vector<float> own_logits;  // a learned unit decides: only rows that leave need the head itself
      if (rule.measure == Measure::exit_unit) {
        own_logits.resize(leaving.size() * outputs);
        evaluate(context, *heads[layer], batch, leaving, own_logits.data());
      }
      for (std::size_t i = 0; i < leaving.size(); ++i) {
        const float* const from = own_logits.empty() ? current.data() + leaving[i] * outputs
                                                     : own_logits.data() + i * outputs;
        std::memcpy(logits + origin[leaving[i]] * outputs, from, outputs * sizeof(float));
        exit_layer[origin[leaving[i]]] = static_cast<std::int64_t>(layer);
      }
    }
    // Close the gaps that leaving rows left behind.
    Starts starts = {0};
    std::size_t kept = 0;
    for (std::size_t row = 0, next = 0; row < rows; ++row) {
      if (next < leaving.size() && leaving[next] == row) {
        ++next;
        continue;
      }
      const std::size_t tokens = batch.starts[row + 1] - batch.starts[row];
      if (kept != row) {
        std::memmove(batch.states + starts.back() * stride, batch.states + batch.starts[row] * stride,
                     tokens * stride * sizeof(float));
        std::memmove(positions.data() + starts.back(), positions.data() + batch.starts[row],
                     tokens * sizeof(std::int64_t));
        origin[kept] = origin[row];
        id_starts[kept] = id_starts[row];
        streak[kept] = streak[row];
        std::memmove(current.data() + kept * outputs, current.data() + row * outputs, outputs * sizeof(float));
      }
      starts.push_back(starts.back() + tokens);
      ++kept;
    }
    batch.starts = std::move(starts);
    if (rule.measure == Measure::patience) previous = current;
  }
}

}  // namespace offramp

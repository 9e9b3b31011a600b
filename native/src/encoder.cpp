#include "encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace offramp {

namespace {

constexpr std::size_t kGroupTokens = 512;   // tokens that go through a layer together: bounds the memory of a call
constexpr std::size_t kElementsPerTask = 16 * 1024;  // of row-wise work

std::size_t rows_per_task(std::size_t width) { return std::max<std::size_t>(1, kElementsPerTask / width); }

template <class Body>
void for_row_chunks(ThreadTeam& team, std::size_t rows, std::size_t width, const Body& body) {
  const std::size_t chunk = rows_per_task(width);
  team.for_each((rows + chunk - 1) / chunk, [&](std::size_t task) {
    for (std::size_t row = task * chunk; row < std::min(rows, (task + 1) * chunk); ++row) body(row);
  });
}

}  // namespace

Workspace& workspace() {
  thread_local Workspace own;
  return own;
}

void clear_filler(float* states, std::size_t rows, std::size_t count, std::size_t stride) {
  if (count == stride) return;
  for (std::size_t row = 0; row < rows; ++row)
    std::memset(states + row * stride + count, 0, (stride - count) * sizeof(float));
}

Encoder::Encoder(std::size_t hidden, int threads, const Kernels& kernels, Embeddings embeddings)
    : hidden_(hidden), threads_(threads), kernels_(kernels), embeddings_(std::move(embeddings)) {}

void Encoder::embed(Context& context, const std::int64_t* ids, const std::int64_t* types,
                    const std::int64_t* positions, std::size_t tokens, float* states) const {
  const Embeddings& e = embeddings_;
  const bool projects = e.projection != nullptr;
  const std::size_t width_stride = projects ? round_up(e.width, kPanel) : stride();
  float* const sums = projects ? context.work.other_states.at_least(tokens * width_stride) : states;
  for_row_chunks(context.team, tokens, e.width, [&](std::size_t token) {
    float* const sum = sums + token * width_stride;
    if (token + 2 < tokens) {  // rows of the table lie anywhere in memory: fetched two tokens ahead
      const float* const later = e.words + ids[token + 2] * e.width;
      for (std::size_t i = 0; i < e.width; i += 16) __builtin_prefetch(later + i, 0, 3);
    }
    std::memcpy(sum, e.words + ids[token] * e.width, e.width * sizeof(float));
    if (e.types != nullptr) context.kernels.add_to(sum, e.types + types[token] * e.width, e.width);
    context.kernels.add_to(sum, e.positions + (positions[token] + e.first_position) * e.width, e.width);
    context.kernels.layer_norm(sum, e.width, e.norm.weight.data(), e.norm.bias.data(), e.norm.epsilon, sum);
    std::memset(sum + e.width, 0, (width_stride - e.width) * sizeof(float));
  });
  if (projects) {
    e.projection->apply(context.team, context.kernels, context.work.rounded, sums, width_stride, tokens,
                        {states, stride()});
  }
}

void Encoder::normalise(Context& context, const Norm& norm, float* states, std::size_t tokens) const {
  for_row_chunks(context.team, tokens, hidden_, [&](std::size_t token) {
    float* const row = states + token * stride();
    context.kernels.layer_norm(row, hidden_, norm.weight.data(), norm.bias.data(), norm.epsilon, row);
  });
}

void attend_rows(Context& context, const HeadsAttention& a) {
  std::size_t longest = 0;
  for (std::size_t row = 0; row < a.rows; ++row)
    longest = std::max(longest, a.key_starts[row + 1] - a.key_starts[row]);
  const std::size_t scratch_size = round_up(attention_scratch(longest, a.width), 16);
  float* const scratch = context.work.scratch.at_least(scratch_size * context.team.threads());
  const std::size_t first_query = a.query_starts[0], first_key = a.key_starts[0];
  const std::size_t keys = a.key_starts[a.rows] - first_key;
  float* by_head = nullptr;  // scores of each head by itself, so that heads are added in one order
  if (a.scores != nullptr) {
    by_head = context.work.scores.at_least(2 * a.heads * keys);
    std::memset(by_head, 0, 2 * a.heads * keys * sizeof(float));
  }
  // Many rows: one task a row. Few rows: one task a head.
  const bool by_row = a.rows >= 4 * static_cast<std::size_t>(context.team.threads());
  context.team.for_each(by_row ? a.rows : a.rows * a.heads, [&](std::size_t task) {
    const std::size_t row = by_row ? task : task / a.heads;
    const std::size_t first_head = by_row ? 0 : task % a.heads, last_head = by_row ? a.heads : first_head + 1;
    const std::size_t query = a.query_starts[row] - first_query, key = a.key_starts[row] - first_key;
    HeadAttention h;
    h.query_count = a.query_starts[row + 1] - a.query_starts[row];
    h.key_count = a.key_starts[row + 1] - a.key_starts[row];
    if (h.query_count == 0) return;
    h.query_stride = a.query_stride;
    h.key_stride = a.key_stride;
    h.width = a.width;
    h.scale = 1.0f / std::sqrt(static_cast<float>(a.width));
    h.output_stride = a.output_stride;
    h.scratch = scratch + scratch_size * ThreadTeam::current();
    h.same = a.same;
    h.reach = static_cast<std::int64_t>(a.reach);
    h.query_positions = a.query_positions == nullptr ? nullptr : a.query_positions + query;
    h.key_positions = a.key_positions == nullptr ? nullptr : a.key_positions + key;
    for (std::size_t head = first_head; head < last_head; ++head) {
      const std::size_t column = head * a.width;
      h.distance_bias = a.distance_bias == nullptr ? nullptr : a.distance_bias + head * (2 * a.reach + 1);
      h.queries = a.queries + query * a.query_stride + column;
      h.keys = a.keys + key * a.key_stride + column;
      h.values = a.values + key * a.key_stride + column;
      h.output = a.output + query * a.output_stride + column;
      h.column_sums = by_head == nullptr ? nullptr : by_head + (2 * head) * keys + key;
      h.diagonal = by_head == nullptr ? nullptr : by_head + (2 * head + 1) * keys + key;
      context.kernels.attend(h);
    }
  });
  if (a.scores == nullptr) return;
  const float share = 1.0f / static_cast<float>(a.heads);
  for (std::size_t key = 0; key < keys; ++key) {
    float received = 0.0f, own = 0.0f;
    for (std::size_t head = 0; head < a.heads; ++head) {
      received += by_head[(2 * head) * keys + key];
      own += by_head[(2 * head + 1) * keys + key];
    }
    a.scores->columns[key] = received * share;
    a.scores->diagonal[key] = own * share;
  }
}

void Encoder::attend(Context& context, std::size_t number, const Attention& attention) const {
  const Layer& layer = this->layer(number);
  const std::size_t inner = layer.inner_stride(), panels = inner / kPanel;
  const std::size_t rows = attention.key_starts.size() - 1;
  for (std::size_t first = 0, last; first < rows; first = last) {  // whole rows, about kGroupTokens tokens at a time
    last = first + 1;
    while (last < rows && attention.key_starts[last + 1] - attention.key_starts[first] <= kGroupTokens) ++last;
    const std::size_t key = attention.key_starts[first], keys = attention.key_starts[last] - key;
    const std::size_t query = attention.query_starts[first], queries = attention.query_starts[last] - query;
    AttentionScores scores = {nullptr, nullptr};
    if (attention.scores != nullptr) scores = {attention.scores->columns + key, attention.scores->diagonal + key};
    if (queries == 0) {  // all tokens of these rows are idle: nothing changes, and no key receives attention
      if (scores.columns != nullptr) {
        std::fill(scores.columns, scores.columns + keys, 0.0f);
        std::fill(scores.diagonal, scores.diagonal + keys, 0.0f);
      }
      continue;
    }
    float* const projected = context.work.query_key_value.at_least(keys * 3 * inner);
    float* const mixed = context.work.context.at_least(std::max(keys, queries) * inner);
    const float* const key_states = attention.keys + key * stride();
    const float* const query_states = attention.queries + query * stride();
    const Linear::Output output = {projected, 3 * inner};
    const Linear& matrix = *layer.query_key_value;
    // Where some tokens are no queries, the places of all keys hold the few queries, packed.
    if (attention.same) {
      matrix.apply(context.team, context.kernels, context.work.rounded, key_states, stride(), keys, output);
    } else {
      matrix.apply(context.team, context.kernels, context.work.rounded, query_states, stride(), queries, output, 0,
                   panels);
      matrix.apply(context.team, context.kernels, context.work.rounded, key_states, stride(), keys, output, panels,
                   3 * panels);
    }
    clear_filler(mixed, queries, layer.inner(), inner);
    HeadsAttention heads;
    heads.queries = projected;
    heads.keys = projected + inner;
    heads.values = projected + 2 * inner;
    heads.query_stride = heads.key_stride = 3 * inner;
    heads.heads = layer.heads;
    heads.width = layer.head_width;
    heads.query_starts = attention.query_starts.data() + first;
    heads.key_starts = attention.key_starts.data() + first;
    heads.rows = last - first;
    heads.same = attention.same;
    heads.distance_bias = layer.distance_bias.empty() ? nullptr : layer.distance_bias.data();
    heads.reach = layer.reach;
    heads.query_positions = attention.query_positions == nullptr ? nullptr : attention.query_positions + query;
    heads.key_positions = attention.key_positions == nullptr ? nullptr : attention.key_positions + key;
    heads.output = mixed;
    heads.output_stride = inner;
    heads.scores = attention.scores == nullptr ? nullptr : &scores;
    attend_rows(context, heads);
    float* const result = attention.output + query * stride();
    layer.out->apply(context.team, context.kernels, context.work.rounded, mixed, inner, queries,
                     {result, stride(), Activation::none, query_states, stride()});
    normalise(context, layer.attention_norm, result, queries);
  }
}

void Encoder::feed(Context& context, std::size_t number, const float* states, std::size_t tokens,
                   float* output) const {
  const Layer& layer = this->layer(number);
  const std::size_t wide = layer.up->stride();
  for (std::size_t first = 0; first < tokens; first += kGroupTokens) {
    const std::size_t count = std::min(kGroupTokens, tokens - first);
    float* const expanded = context.work.expanded.at_least(count * wide);
    const float* const from = states + first * stride();
    float* const to = output + first * stride();
    layer.up->apply(context.team, context.kernels, context.work.rounded, from, stride(), count,
                    {expanded, wide, layer.activation});
    layer.down->apply(context.team, context.kernels, context.work.rounded, expanded, wide, count,
                      {to, stride(), Activation::none, from, stride()});
    normalise(context, layer.feed_norm, to, count);
  }
}

void Encoder::run_layer(Context& context, std::size_t number, const Starts& starts, const std::int64_t* positions,
                        float* states) const {
  const std::size_t tokens = starts.back();
  float* const between = context.work.other_states.at_least(tokens * stride());
  attend(context, number, {states, states, true, starts, starts, positions, positions, between, nullptr});
  feed(context, number, between, tokens, states);
}

}  // namespace offramp

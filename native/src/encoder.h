// A BERT-like encoder on packed rows: embeddings, and layers in two halves (attention, add, norm; feed-forward, add,
// norm). Rows lie one after another without padding.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "linear.h"
#include "thread_team.h"

namespace offramp {

struct Norm {
  std::vector<float> weight, bias;
  float epsilon = 0.0f;
};

struct Embeddings {
  const float *words, *positions, *types;  // tables [count, width]; types may be nullptr
  std::size_t word_count, position_count, type_count, width;
  std::size_t first_position;  // added to every position
  Norm norm;
  std::unique_ptr<Linear> projection;  // to the width of the layers, or nullptr
};

struct Layer {
  std::size_t heads, head_width;
  std::shared_ptr<const Linear> query_key_value;  // each of the three filled up to whole panels
  std::shared_ptr<const Linear> out, up, down;
  Activation activation;
  Norm attention_norm, feed_norm;
  std::vector<float> distance_bias;  // [heads, 2 * reach + 1] added to the attention scores of distances, or empty
  std::size_t reach = 0;

  std::size_t inner() const { return heads * head_width; }
  std::size_t inner_stride() const { return round_up(inner(), kPanel); }
};

// Memory of one calling thread, used again by its next call.
struct Workspace {
  Buffer<float> states, other_states, query_key_value, context, expanded, scratch, scores;
  Buffer<float> features, more_features, logits;
  RoundedRows rounded;
};

Workspace& workspace();

// What one call computes with.
struct Context {
  ThreadTeam& team;
  const Kernels& kernels;
  Workspace& work;
};

struct AttentionScores {
  float* columns;  // [keys] attention received, summed over queries and averaged over heads
  float* diagonal;  // [keys] attention given to itself
};

using Starts = std::vector<std::size_t>;  // [rows + 1] first token of each row, and the number of tokens

class Encoder {
 public:
  Encoder(std::size_t hidden, int threads, const Kernels& kernels, Embeddings embeddings);

  void add_layer(Layer layer) { layers_.push_back(std::move(layer)); }
  std::size_t depth() const { return layers_.size(); }
  std::size_t hidden() const { return hidden_; }
  std::size_t stride() const { return round_up(hidden_, kPanel); }  // floats between rows of states inside the engine
  const Layer& layer(std::size_t number) const { return layers_[number - 1]; }
  const Embeddings& embeddings() const { return embeddings_; }
  const Kernels& kernels() const { return kernels_; }
  PoolOwner& threads() { return threads_; }

  // All states have `stride` floats a token, zeros behind the first `hidden`.
  void embed(Context& context, const std::int64_t* ids, const std::int64_t* types, const std::int64_t* positions,
             std::size_t tokens, float* states) const;
  // `positions` [tokens] may be nullptr where no layer counts distances.
  void run_layer(Context& context, std::size_t number, const Starts& starts, const std::int64_t* positions,
                 float* states) const;

  // The first half alone. `queries` are some of the tokens whose states are `keys`.
  struct Attention {
    const float *queries, *keys;
    bool same;  // queries are all of the keys, in the same memory
    const Starts &query_starts, &key_starts;
    const std::int64_t *query_positions, *key_positions;  // may be nullptr where queries are the keys
    float* output;                                        // [queries, stride]
    const AttentionScores* scores;                        // or nullptr
  };
  void attend(Context& context, std::size_t number, const Attention& attention) const;
  void feed(Context& context, std::size_t number, const float* states, std::size_t tokens, float* output) const;

 private:
  void normalise(Context& context, const Norm& norm, float* states, std::size_t tokens) const;

  std::size_t hidden_;
  PoolOwner threads_;
  const Kernels& kernels_;
  Embeddings embeddings_;
  std::vector<Layer> layers_;
};

// Attention of `heads` heads for some rows, on projected queries, keys and values; used by layers and by exit heads.
// All pointers stand at the first token of the first row, wherever the starts begin to count.
struct HeadsAttention {
  const float *queries, *keys, *values;
  std::size_t query_stride, key_stride;
  std::size_t heads, width;
  const std::size_t *query_starts, *key_starts;  // [rows + 1]
  std::size_t rows;
  bool same;  // queries are the keys
  const std::int64_t *query_positions, *key_positions;
  const float* distance_bias;  // [heads, 2 * reach + 1] or nullptr
  std::size_t reach;
  float* output;
  std::size_t output_stride;
  const AttentionScores* scores;
};
void attend_rows(Context& context, const HeadsAttention& attention);

// Fills up the columns behind `count` of each row with zeros.
void clear_filler(float* states, std::size_t rows, std::size_t count, std::size_t stride);

}  // namespace offramp

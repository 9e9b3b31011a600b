// Exit heads, and the whole adaptive run under an exit rule.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "encoder.h"

namespace offramp {

enum class Pool { first, mean, max };

// One step of a head on a matrix of states or features.
struct HeadStep {
  enum class Kind { linear, norm, activation, attention } kind;
  std::shared_ptr<const Linear> linear;
  Buffer<std::uint8_t> packed;            // weights of `linear`
  std::vector<float> few_rows, few_bias;  // of a matrix with few outputs: [outputs, inputs], multiplied by dot products
  std::size_t inputs = 0, outputs = 0;
  Norm norm;
  Activation activation = Activation::none;
  std::size_t heads = 0;  // attention: steps before it give queries, keys and values side by side
};

// Two tables: what each token and each pair of neighbours adds to the logits.
struct BagOfWords {
  const float *words, *pairs;  // [word_count, outputs], [pair_count, outputs]
  std::size_t word_count, pair_count;
  std::int64_t factor_here, factor_next;  // of the hash of a pair
  std::vector<float> bias;                // [outputs], or empty
  float scale;                            // of the sums
  bool by_root_of_length;                 // sums are divided by the square root of the row's length
};

class Head {
 public:
  std::vector<HeadStep> token_steps;  // on the states of every token
  std::vector<Pool> pools;            // side by side
  std::vector<HeadStep> row_steps;    // on pooled features
  std::optional<BagOfWords> bag_of_words;

  void check(std::size_t hidden);  // throws std::invalid_argument unless the steps fit each other
  std::size_t outputs() const { return outputs_; }

 private:
  std::size_t outputs_ = 0;
};

// A matrix with few outputs is kept in fp32, whatever the precision.
HeadStep linear_step(Precision precision, const float* weights, const float* bias, std::size_t outputs,
                     std::size_t inputs);

// Rows on their way through the model.
struct Batch {
  const std::int64_t *ids, *positions;  // of all tokens as they were packed
  const std::size_t* id_starts;         // [rows] where each row's ids begin
  Starts starts;                        // of the states
  float* states;
  std::size_t hidden, stride;
  std::size_t rows() const { return starts.size() - 1; }
};

// Logits of some rows, given by their indices, written one after another.
void evaluate(Context& context, const Head& head, const Batch& batch, const std::vector<std::size_t>& rows,
              float* logits);

enum class Measure { entropy, normalised_entropy, least_confidence, exit_unit, patience };

struct Rule {
  Measure measure;
  std::vector<std::size_t> exits;
  std::vector<double> thresholds;   // one for each exit
  std::vector<float> temperatures;  // one for each exit, or none
  std::int64_t patience = 0;
  float tolerance = 0.0f;
  bool by_row = false;

  bool consults(std::size_t exit_number) const;
};

// Settings of each row, where rows bring their own.
struct RowSettings {
  const float* thresholds = nullptr;    // [rows, exits]
  const float* temperatures = nullptr;  // [rows, exits]
  const std::int64_t* patience = nullptr;
};

struct Input {
  const std::int64_t *ids, *types, *positions;  // [tokens]
  Starts starts;
};

// Runs a batch until every row has left: logits [rows, outputs] and the layer where each row left.
void run_rule(Encoder& encoder, Context& context, const Rule& rule, const RowSettings& settings,
              const std::vector<std::shared_ptr<const Head>>& heads, const Head* exit_unit, const Input& input,
              float* logits, std::int64_t* exit_layer);

float uncertainty(Measure measure, const float* logits, std::size_t count, float temperature);

}  // namespace offramp

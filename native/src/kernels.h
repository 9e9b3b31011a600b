// The table of kernels that every instruction set provides.
//
// Every number that a kernel writes for one row depends on that row alone, never on how many rows it is given: sums run
// over their terms in one fixed order. This is what makes answers independent of the batch, bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>

// Loops over the rows and vectors of a tile are unrolled completely: otherwise its sums would not stay in registers.
#if defined(__clang__)
#define OFFRAMP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OFFRAMP_UNROLL _Pragma("GCC unroll 16")
#endif

namespace offramp {

constexpr std::size_t kPanel = 32;       // columns of a weight matrix that are stored, and computed, together
constexpr std::size_t kByteGroup = 4;    // int8: so many inputs of one column lie side by side
constexpr std::size_t kHalfGroup = 2;    // bf16: likewise
constexpr std::size_t kQueryBlock = 12;  // queries of one head that attention computes together

enum class Activation : int { none, gelu, gelu_tanh, relu, tanh, sigmoid };

constexpr std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

// rows × one or more panels: output = input · weightsᵀ + bias + residual
struct MatrixProduct {
  const void* input;          // [rows, input_stride] of the precision: float, bf16 or bytes
  std::size_t input_stride;   // in elements
  const float* input_scale;   // int8: step and offset of each row, [rows, 2]
  const void* weights;        // packed panels, the first one of this product
  std::size_t inputs;         // length of the sums; bf16, int8: rounded up to whole groups
  std::size_t panels;
  const float* bias;          // [panels * kPanel]
  const float* weight_scale;  // int8: [panels * kPanel]
  const std::int32_t* weight_sum;  // int8: [panels * kPanel], of the weights of each column
  const float* residual;  // [rows, residual_stride] or nullptr
  std::size_t residual_stride;
  float* output;  // [rows, output_stride]
  std::size_t output_stride;
  std::size_t rows;
};

// One head of one row: output = softmax(queries · keysᵀ · scale) · values
struct HeadAttention {
  const float* queries;  // [query_count, stride]
  const float* keys;     // [key_count, stride]
  const float* values;   // [key_count, stride]
  std::size_t query_stride, key_stride;
  std::size_t query_count, key_count;
  std::size_t width;  // of the head
  float scale;
  float* output;  // [query_count, output_stride]
  std::size_t output_stride;
  float* scratch;                         // attention_scratch(key_count, width) floats
  float* column_sums;                     // [key_count] attention each key received, or nullptr
  float* diagonal;                        // [key_count] attention each token gave itself; with column_sums only
  bool same;                              // queries are the keys
  const std::int64_t* query_positions;    // [query_count] in the original row; where distances count, or not same
  const std::int64_t* key_positions;      // [key_count]
  const float* distance_bias;             // [2 * reach + 1] added to the score of each distance, or nullptr
  std::int64_t reach;                     // larger distances count as this one
};

inline std::size_t attention_scratch(std::size_t keys, std::size_t width) {
  const std::size_t padded_keys = round_up(keys, kPanel), padded_width = round_up(width, kPanel);
  return padded_keys * width + keys * padded_width + kQueryBlock * (padded_keys + padded_width);
}

struct Kernels {
  void (*product_f32)(const MatrixProduct&);
  void (*product_bf16)(const MatrixProduct&);  // nullptr where the instruction set has no bf16
  void (*product_i8)(const MatrixProduct&);
  void (*attend)(const HeadAttention&);
  // Rounds a row to bytes between its own smallest and largest value, and fills up to padded. scale[0] is the step
  // between neighbouring bytes and scale[1] the value of byte 0, as the instruction set's own product reads bytes.
  void (*quantise_row)(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes, float* scale);
  void (*round_row_bf16)(const float* row, std::size_t count, std::size_t padded, std::uint16_t* halves);
  // output = (row - mean) / sqrt(variance + epsilon) * weight + bias; output may be the row.
  void (*layer_norm)(const float* row, std::size_t count, const float* weight, const float* bias, float epsilon,
                     float* output);
  void (*activate)(Activation activation, float* row, std::size_t count);
  void (*add_to)(float* sum, const float* row, std::size_t count);
  void (*max_to)(float* largest, const float* row, std::size_t count);
  float (*dot)(const float* a, const float* b, std::size_t count);
};

const Kernels& portable_kernels();
#ifdef OFFRAMP_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();
// What the last two tables add to that of AVX-512.
void avx512_vnni_product(const MatrixProduct&);
void avx512_vnni_quantise_row(const float*, std::size_t, std::size_t, std::uint8_t*, float*);
void avx512_bf16_product(const MatrixProduct&);
void avx512_bf16_round_row(const float*, std::size_t, std::size_t, std::uint16_t*);
#endif

}  // namespace offramp

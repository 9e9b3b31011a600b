// Linear layers with packed weights, in three precisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels.h"
#include "thread_team.h"

namespace offramp {

enum class Precision { f32, bf16, i8 };

// Counts the ways in which Linear::pack has laid out weights: raised with every change of a byte that it writes, so that
// files of packed weights are not read by another layout.
constexpr int kPackedLayout = 2;  // 2: int8 weights that are not finite have NaN as their scale

Precision parse_precision(const std::string& name);  // "fp32", "bf16" or "int8"; throws std::invalid_argument
Activation parse_activation(const std::string& name);

// Memory whose contents are not kept when it grows, aligned to cache lines.
template <class T>
class Buffer {
 public:
  T* at_least(std::size_t count) {
    if (count > size_) {
      storage_.reset();
      size_ = 0;
      storage_ = Storage(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
      size_ = count;
    }
    return storage_.get();
  }
  T* get() { return storage_.get(); }

 private:
  struct Delete {
    void operator()(T* memory) const { ::operator delete(memory, std::align_val_t(64)); }
  };
  using Storage = std::unique_ptr<T, Delete>;
  Storage storage_;
  std::size_t size_ = 0;
};

// Inputs of a product after rounding to its precision.
struct RoundedRows {
  Buffer<std::uint8_t> bytes;
  Buffer<float> scales;
};

class Linear {
 public:
  // The packed size in bytes of a matrix [outputs, inputs].
  static std::size_t packed_size(Precision precision, std::size_t outputs, std::size_t inputs);
  // Packs a matrix [outputs, inputs] into packed_size bytes.
  static void pack(Precision precision, const float* weights, std::size_t outputs, std::size_t inputs,
                   std::uint8_t* packed);

  // Packed weights are not copied: their owner keeps them alive.
  Linear(Precision precision, std::size_t outputs, std::size_t inputs, const std::uint8_t* packed, const float* bias);

  std::size_t outputs() const { return outputs_; }
  std::size_t inputs() const { return inputs_; }
  std::size_t panels() const { return panels_; }
  std::size_t stride() const { return panels_ * kPanel; }  // floats from one row of outputs to the next
  Precision precision() const { return precision_; }

  struct Output {
    float* values;
    std::size_t stride;
    Activation activation = Activation::none;
    const float* residual = nullptr;
    std::size_t residual_stride = 0;
  };

  // output[row] = activation(weights · input[row] + bias + residual[row]), for panels first_panel … last_panel - 1 only.
  void apply(ThreadTeam& team, const Kernels& kernels, RoundedRows& rounded, const float* input,
             std::size_t input_stride, std::size_t rows, const Output& output, std::size_t first_panel,
             std::size_t last_panel) const;
  void apply(ThreadTeam& team, const Kernels& kernels, RoundedRows& rounded, const float* input,
             std::size_t input_stride, std::size_t rows, const Output& output) const {
    apply(team, kernels, rounded, input, input_stride, rows, output, 0, panels_);
  }

 private:
  std::size_t padded_inputs() const;
  std::size_t element_size() const;

  Precision precision_;
  std::size_t outputs_, inputs_, panels_;
  const std::uint8_t* packed_;
  const float* scales_ = nullptr;        // int8, behind the weights
  const std::int32_t* sums_ = nullptr;   // int8, behind the scales
  std::vector<float> bias_;              // filled up to whole panels
};

}  // namespace offramp

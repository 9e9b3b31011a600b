#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace offramp {

namespace {

constexpr std::size_t kRowBlock = 48;             // rows of one task: their inputs stay in the second-level cache
constexpr std::size_t kSmallestTask = 32 * 1024;  // products below which a task is not worth handing over

std::size_t group_of(Precision precision) {
  return precision == Precision::i8 ? kByteGroup : precision == Precision::bf16 ? kHalfGroup : 1;
}

std::size_t size_of(Precision precision) {
  return precision == Precision::i8 ? 1 : precision == Precision::bf16 ? 2 : sizeof(float);
}

std::uint16_t rounded_to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fc0;
  bits += 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
  return static_cast<std::uint16_t>(bits >> 16);
}

}  // namespace

Precision parse_precision(const std::string& name) {
  if (name == "fp32") return Precision::f32;
  if (name == "bf16") return Precision::bf16;
  if (name == "int8") return Precision::i8;
  throw std::invalid_argument("unknown precision '" + name + "'; use one of: fp32, bf16, int8");
}

Activation parse_activation(const std::string& name) {
  if (name.empty()) return Activation::none;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "tanh") return Activation::tanh;
  if (name == "sigmoid") return Activation::sigmoid;
  throw std::invalid_argument("unknown activation '" + name + "'; use one of: gelu, gelu_tanh, relu, tanh, sigmoid");
}

std::size_t Linear::packed_size(Precision precision, std::size_t outputs, std::size_t inputs) {
  const std::size_t columns = round_up(outputs, kPanel);
  const std::size_t weights = columns * round_up(inputs, group_of(precision)) * size_of(precision);
  return precision == Precision::i8 ? weights + columns * (sizeof(float) + sizeof(std::int32_t)) : weights;
}

void Linear::pack(Precision precision, const float* weights, std::size_t outputs, std::size_t inputs,
                  std::uint8_t* packed) {
  const std::size_t group = group_of(precision), padded = round_up(inputs, group);
  const std::size_t columns = round_up(outputs, kPanel);
  std::memset(packed, 0, packed_size(precision, outputs, inputs));
  auto* const floats = reinterpret_cast<float*>(packed);
  auto* const halves = reinterpret_cast<std::uint16_t*>(packed);
  auto* const bytes = reinterpret_cast<std::int8_t*>(packed);
  auto* const scales = reinterpret_cast<float*>(packed + columns * padded);
  auto* const sums = reinterpret_cast<std::int32_t*>(scales + columns);
  for (std::size_t output = 0; output < outputs; ++output) {
    const float* const row = weights + output * inputs;
    const std::size_t panel = output / kPanel, column = output % kPanel;
    float inverse = 0.0f;
    if (precision == Precision::i8) {
      float most = 0.0f;
      bool finite = true;
      for (std::size_t k = 0; k < inputs; ++k) {
        most = std::max(most, std::fabs(row[k]));
        finite = finite && std::isfinite(row[k]);
      }
      if (!finite) {  // no byte can say so: the scale does, and every answer of this output is NaN
        scales[output] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      scales[output] = most / 127.0f;
      inverse = most > 0.0f ? 127.0f / most : 0.0f;
    }
    for (std::size_t k = 0; k < inputs; ++k) {
      const std::size_t place = panel * padded * kPanel + k / group * group * kPanel + column * group + k % group;
      if (precision == Precision::f32) {
        floats[place] = row[k];
      } else if (precision == Precision::bf16) {
        halves[place] = rounded_to_bf16(row[k]);
      } else {
        const float whole = std::min(127.0f, std::max(-127.0f, std::nearbyint(row[k] * inverse)));
        bytes[place] = static_cast<std::int8_t>(whole);
        sums[output] += bytes[place];
      }
    }
  }
}

Linear::Linear(Precision precision, std::size_t outputs, std::size_t inputs, const std::uint8_t* packed,
               const float* bias)
    : precision_(precision), outputs_(outputs), inputs_(inputs), panels_(round_up(outputs, kPanel) / kPanel),
      packed_(packed), bias_(panels_ * kPanel, 0.0f) {
  if (bias != nullptr) std::copy(bias, bias + outputs, bias_.begin());
  if (precision == Precision::i8) {
    scales_ = reinterpret_cast<const float*>(packed + panels_ * kPanel * padded_inputs());
    sums_ = reinterpret_cast<const std::int32_t*>(scales_ + panels_ * kPanel);
  }
}

std::size_t Linear::padded_inputs() const { return round_up(inputs_, group_of(precision_)); }

std::size_t Linear::element_size() const { return size_of(precision_); }

void Linear::apply(ThreadTeam& team, const Kernels& kernels, RoundedRows& rounded, const float* input,
                   std::size_t input_stride, std::size_t rows, const Output& output, std::size_t first_panel,
                   std::size_t last_panel) const {
  if (rows == 0) return;
  const void* source = input;
  std::size_t source_stride = input_stride;
  const float* source_scales = nullptr;
  const std::size_t width = padded_inputs(), element = element_size();
  if (precision_ != Precision::f32) {
    source_stride = round_up(width, 64 / element);
    std::uint8_t* const bytes = rounded.bytes.at_least(rows * source_stride * element);
    float* const scales = rounded.scales.at_least(2 * rows);
    const std::size_t chunk = std::max<std::size_t>(1, kSmallestTask / (8 * width));
    team.for_each((rows + chunk - 1) / chunk, [&](std::size_t task) {
      for (std::size_t row = task * chunk; row < std::min(rows, (task + 1) * chunk); ++row) {
        std::uint8_t* const to = bytes + row * source_stride * element;
        const float* const from = input + row * input_stride;
        if (precision_ == Precision::i8) kernels.quantise_row(from, inputs_, width, to, scales + 2 * row);
        else kernels.round_row_bf16(from, inputs_, width, reinterpret_cast<std::uint16_t*>(to));
      }
    });
    source = bytes;
    source_scales = scales;
  }
  const auto product = precision_ == Precision::f32    ? kernels.product_f32
                       : precision_ == Precision::bf16 ? kernels.product_bf16
                                                       : kernels.product_i8;
  // Tasks are blocks of rows by groups of panels: enough of them to share out, none so small that sharing costs more.
  const std::size_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  const std::size_t panels = last_panel - first_panel;
  const std::size_t block_rows = (rows + blocks - 1) / blocks;
  const std::size_t smallest = std::max<std::size_t>(1, kSmallestTask / (block_rows * width * kPanel));
  const std::size_t wanted = team.threads() == 1 ? 1 : std::max<std::size_t>(1, 4 * team.threads() / blocks);
  const std::size_t groups = std::max<std::size_t>(1, std::min(wanted, panels / smallest));
  team.for_each(blocks * groups, [&](std::size_t task) {
    const std::size_t block = task / groups, group = task % groups;
    const std::size_t first_row = block * rows / blocks, last_row = (block + 1) * rows / blocks;
    const std::size_t from = first_panel + group * panels / groups, to = first_panel + (group + 1) * panels / groups;
    const std::size_t column = from * kPanel;
    MatrixProduct p;
    p.input = static_cast<const std::uint8_t*>(source) + first_row * source_stride * element;
    p.input_stride = source_stride;
    p.input_scale = source_scales == nullptr ? nullptr : source_scales + 2 * first_row;
    p.weights = packed_ + column * width * element;
    p.inputs = width;
    p.panels = to - from;
    p.bias = bias_.data() + column;
    p.weight_scale = scales_ == nullptr ? nullptr : scales_ + column;
    p.weight_sum = sums_ == nullptr ? nullptr : sums_ + column;
    p.residual = output.residual == nullptr ? nullptr : output.residual + first_row * output.residual_stride + column;
    p.residual_stride = output.residual_stride;
    p.output = output.values + first_row * output.stride + column;
    p.output_stride = output.stride;
    p.rows = last_row - first_row;
    product(p);
    if (output.activation == Activation::none) return;
    for (std::size_t row = 0; row < p.rows; ++row)
      kernels.activate(output.activation, p.output + row * p.output_stride, p.panels * kPanel);
  });
}

}  // namespace offramp

// Kernels for any processor.
#include "kernels.h"

namespace offramp {
namespace portable {

constexpr int kTileRows = 4;
constexpr std::size_t kTileVectors = 2;
#include "vector_portable.h"
#include "kernels_body.h"

void quantise_row(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes, float* scale) {
  store_quantised(row, count, padded, bytes, scale);
}

void product_i8(const MatrixProduct& p) {
  for (std::size_t panel = 0; panel < p.panels; ++panel) {
    const std::int8_t* const weights = static_cast<const std::int8_t*>(p.weights) + panel * p.inputs * kPanel;
    for (std::size_t row = 0; row < p.rows; ++row) {
      const std::int8_t* const input = static_cast<const std::int8_t*>(p.input) + row * p.input_stride;
      std::int32_t sums[kPanel] = {};
      for (std::size_t k = 0; k < p.inputs; k += kByteGroup) {
        const std::int8_t* const group = weights + k * kPanel;
        for (std::size_t column = 0; column < kPanel; ++column)
          for (std::size_t i = 0; i < kByteGroup; ++i) sums[column] += input[k + i] * group[column * kByteGroup + i];
      }
      for (std::size_t column = 0; column < kPanel; column += Vector::width) {
        const std::size_t place = panel * kPanel + column;
        Vector value, total;
        for (std::size_t lane = 0; lane < Vector::width; ++lane) {
          value.v[lane] = static_cast<float>(sums[column + lane]);
          total.v[lane] = static_cast<float>(p.weight_sum[place + lane]);
        }
        const Vector step = Vector::all(p.input_scale[2 * row]), offset = Vector::all(p.input_scale[2 * row + 1]);
        const Vector weight_step = Vector::load(p.weight_scale + place);
        finish(p, row, place, byte_sums_to_floats(value, step, offset, weight_step, total * weight_step));
      }
    }
  }
}

}  // namespace portable

const Kernels& portable_kernels() {
  using namespace portable;
  static const Kernels table = {product_f32, nullptr,  product_i8, attend, quantise_row, nullptr,
                                layer_norm,  activate, add_to,     max_to, dot};
  return table;
}

}  // namespace offramp

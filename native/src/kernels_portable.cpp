// Kernels for any processor.
#include "kernels.h"

namespace offramp {
namespace portable {

constexpr int kTileRows = 4;
constexpr std::size_t kTileVectors = 2;
#include "vector_portable.h"
#include "kernels_body.h"

void quantise_row(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes, float* scale) {
  const ByteScale own = byte_scale(row, count);
  *scale = own.step;
  store_quantised(row, count, padded, bytes, own.inverse);
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
        Vector value;
        for (std::size_t lane = 0; lane < Vector::width; ++lane) value.v[lane] = static_cast<float>(sums[column + lane]);
        const std::size_t place = panel * kPanel + column;
        finish(p, row, place, value * (Vector::all(p.input_scale[row]) * Vector::load(p.weight_scale + place)));
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

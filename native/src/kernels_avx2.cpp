// Kernels for processors with AVX2 and FMA.
#include <immintrin.h>

#include "kernels.h"

namespace offramp {
namespace avx2 {

constexpr int kTileRows = 6;
constexpr std::size_t kTileVectors = 2;
#include "vector_avx2.h"
#include "kernels_body.h"

void quantise_row(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes, float* scale) {
  store_quantised(row, count, padded, bytes, scale);
}

// Eight columns by four inputs in one register. The instruction multiplies unsigned by signed bytes and adds neighbours
// in 16 bits, so the sign of an input moves to the weight: inputs are at most 128 and weights 127, no sum overflows.
template <int Rows>
void byte_tile(const MatrixProduct& p, std::size_t first_row, std::size_t panel) {
  constexpr int kVectors = 2;
  const std::int8_t* const input = static_cast<const std::int8_t*>(p.input) + first_row * p.input_stride;
  const std::int8_t* const weights = static_cast<const std::int8_t*>(p.weights) + panel * p.inputs * kPanel;
  const __m256i ones = _mm256_set1_epi16(1);
  for (std::size_t column = 0; column < kPanel; column += kVectors * 8) {
    __m256i sums[Rows][kVectors];
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r)
      OFFRAMP_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_setzero_si256();
    for (std::size_t k = 0; k < p.inputs; k += kByteGroup) {
      __m256i group[kVectors];
      OFFRAMP_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const std::int8_t* const from = weights + k * kPanel + (column + v * 8) * kByteGroup;
        group[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      }
      OFFRAMP_UNROLL
      for (int r = 0; r < Rows; ++r) {
        std::int32_t four;
        __builtin_memcpy(&four, input + r * p.input_stride + k, sizeof four);
        const __m256i value = _mm256_set1_epi32(four), size = _mm256_abs_epi8(value);
        OFFRAMP_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(group[v], value));
          sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r)
      OFFRAMP_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const std::size_t row = first_row + r, place = panel * kPanel + column + v * 8;
        const auto* const weight_sum = reinterpret_cast<const __m256i*>(p.weight_sum + place);
        const Vector sum = {_mm256_cvtepi32_ps(sums[r][v])}, weight_step = Vector::load(p.weight_scale + place);
        const Vector total = Vector{_mm256_cvtepi32_ps(_mm256_loadu_si256(weight_sum))} * weight_step;
        const Vector step = Vector::all(p.input_scale[2 * row]), offset = Vector::all(p.input_scale[2 * row + 1]);
        finish(p, row, place, byte_sums_to_floats(sum, step, offset, weight_step, total));
      }
  }
}

void product_i8(const MatrixProduct& p) {
  for (std::size_t panel = 0; panel < p.panels; ++panel) {
    std::size_t row = 0;
    for (; row + 4 <= p.rows; row += 4) byte_tile<4>(p, row, panel);
    for (; row < p.rows; ++row) byte_tile<1>(p, row, panel);
  }
}

}  // namespace avx2

const Kernels& avx2_kernels() {
  using namespace avx2;
  static const Kernels table = {product_f32, nullptr,  product_i8, attend, quantise_row, nullptr,
                                layer_norm,  activate, add_to,     max_to, dot};
  return table;
}

}  // namespace offramp

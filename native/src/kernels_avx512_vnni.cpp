// int8 products for processors with AVX-512 VNNI: four products of bytes are added to a 32-bit sum in one instruction.
#include <immintrin.h>

#include "kernels.h"

namespace offramp {
namespace avx512_vnni {

constexpr int kTileRows = 12;
constexpr std::size_t kTileVectors = 2;
#include "vector_avx512.h"
#include "kernels_body.h"

// The instruction takes unsigned inputs: they are stored 128 too large, and 128 times the sum of a column's weights is
// subtracted in the end. All of it is exact.
template <int Rows>
void byte_tile(const MatrixProduct& p, std::size_t first_row, std::size_t panel) {
  const std::uint8_t* const input = static_cast<const std::uint8_t*>(p.input) + first_row * p.input_stride;
  const std::int8_t* weights = static_cast<const std::int8_t*>(p.weights) + panel * p.inputs * kPanel;
  __m512i sums[Rows][kTileVectors];
  for (int r = 0; r < Rows; ++r)
    for (std::size_t v = 0; v < kTileVectors; ++v) sums[r][v] = _mm512_setzero_si512();
  for (std::size_t k = 0; k < p.inputs; k += kByteGroup) {
    __m512i group[kTileVectors];
    for (std::size_t v = 0; v < kTileVectors; ++v) group[v] = _mm512_loadu_si512(weights + v * 64);
    for (int r = 0; r < Rows; ++r) {
      std::int32_t four;
      __builtin_memcpy(&four, input + r * p.input_stride + k, sizeof four);
      const __m512i value = _mm512_set1_epi32(four);
      for (std::size_t v = 0; v < kTileVectors; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], value, group[v]);
    }
    weights += kByteGroup * kPanel;
  }
  for (std::size_t v = 0; v < kTileVectors; ++v) {
    const std::size_t place = panel * kPanel + v * Vector::width;
    const __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(p.weight_sum + place), 7);
    const Vector step = Vector::load(p.weight_scale + place);
    for (int r = 0; r < Rows; ++r) {
      const Vector sum = {_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][v], excess))};
      finish(p, first_row + r, place, sum * (Vector::all(p.input_scale[first_row + r]) * step));
    }
  }
}

template <int Rows>
inline void byte_rows(const MatrixProduct& p, std::size_t first_row, std::size_t rows, std::size_t panel) {
  if (rows == Rows) {
    byte_tile<Rows>(p, first_row, panel);
  } else if constexpr (Rows > 1) {
    byte_rows<Rows - 1>(p, first_row, rows, panel);
  }
}

}  // namespace avx512_vnni

void avx512_vnni_product(const MatrixProduct& p) {
  using namespace avx512_vnni;
  const std::size_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  for (std::size_t panel = 0; panel < p.panels; ++panel) {
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::size_t first = tile * p.rows / tiles, last = (tile + 1) * p.rows / tiles;
      byte_rows<kTileRows>(p, first, last - first, panel);
    }
  }
}

void avx512_vnni_quantise_row(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes,
                              float* scale) {
  using namespace avx512_vnni;
  const ByteScale own = byte_scale(row, count);
  *scale = own.step;
  store_quantised(row, count, padded, bytes, own.inverse, 0x80);
}

}  // namespace offramp

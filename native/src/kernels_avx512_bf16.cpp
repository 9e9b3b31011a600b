// bf16 products for processors with AVX-512 BF16: two products are added to a 32-bit float in one instruction.
#include <immintrin.h>

#include "kernels.h"

namespace offramp {
namespace avx512_bf16 {

constexpr int kTileRows = 12;
constexpr std::size_t kTileVectors = 2;
#include "vector_avx512.h"
#include "kernels_body.h"

template <int Rows>
void half_tile(const MatrixProduct& p, std::size_t first_row, std::size_t panel, std::size_t next_panel) {
  const std::uint16_t* const input = static_cast<const std::uint16_t*>(p.input) + first_row * p.input_stride;
  const std::uint16_t* weights = static_cast<const std::uint16_t*>(p.weights) + panel * p.inputs * kPanel;
  const std::uint16_t* next = static_cast<const std::uint16_t*>(p.weights) + next_panel * p.inputs * kPanel;
  __m512 sums[Rows][kTileVectors];
  OFFRAMP_UNROLL
  for (int r = 0; r < Rows; ++r)
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) sums[r][v] = _mm512_setzero_ps();
  for (std::size_t k = 0; k < p.inputs; k += kHalfGroup) {
    __m512i group[kTileVectors];
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) {
      group[v] = _mm512_loadu_si512(weights + v * 32);
      __builtin_prefetch(next + v * 32, 0, 2);
    }
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r) {
      std::int32_t two;
      __builtin_memcpy(&two, input + r * p.input_stride + k, sizeof two);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(two);
      OFFRAMP_UNROLL
      for (std::size_t v = 0; v < kTileVectors; ++v)
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], value, (__m512bh)group[v]);
    }
    weights += kHalfGroup * kPanel;
    next += kHalfGroup * kPanel;
  }
  OFFRAMP_UNROLL
  for (int r = 0; r < Rows; ++r)
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v)
      finish(p, first_row + r, panel * kPanel + v * Vector::width, Vector{sums[r][v]});
}

template <int Rows>
inline void half_rows(const MatrixProduct& p, std::size_t first_row, std::size_t rows, std::size_t panel,
                      std::size_t next_panel) {
  if (rows == Rows) {
    half_tile<Rows>(p, first_row, panel, next_panel);
  } else if constexpr (Rows > 1) {
    half_rows<Rows - 1>(p, first_row, rows, panel, next_panel);
  }
}

}  // namespace avx512_bf16

void avx512_bf16_product(const MatrixProduct& p) {
  using namespace avx512_bf16;
  for_tiles(p, [&](std::size_t first, std::size_t rows, std::size_t panel, std::size_t next) {
    half_rows<kTileRows>(p, first, rows, panel, next);
  });
}

void avx512_bf16_round_row(const float* row, std::size_t count, std::size_t padded, std::uint16_t* halves) {
  using namespace avx512_bf16;
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(row + i));
    __builtin_memcpy(halves + i, &rounded, sizeof rounded);
  }
  if (i < padded) {  // the rest, and zeros behind it; less than sixteen of both
    std::uint16_t last[16];
    const __m256bh rounded = _mm512_cvtneps_pbh(Vector::load_part(row + i, count - i, Vector::zero()).v);
    __builtin_memcpy(last, &rounded, sizeof rounded);
    for (std::size_t place = i; place < padded; ++place) halves[place] = place - i < 16 ? last[place - i] : 0;
  }
}

}  // namespace offramp

// int8 products for processors with AVX-512 VNNI: four products of bytes are added to a 32-bit sum in one instruction.
#include <immintrin.h>

#include "kernels.h"

namespace offramp {
namespace avx512_vnni {

constexpr int kTileRows = 12;
constexpr std::size_t kTileVectors = 2;
#include "vector_avx512.h"
#include "kernels_body.h"

// Written as assembly because g++ 12 copies every sum before the intrinsic and then runs out of registers, which halves
// the speed of tall tiles.
inline void add_products(__m512i& sums, __m512i inputs, __m512i weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(inputs), "v"(weights));
}

// The instruction takes unsigned inputs, so bytes are the levels of a row themselves. Sums are exact.
template <int Rows>
void byte_tile(const MatrixProduct& p, std::size_t first_row, std::size_t panel, std::size_t next_panel) {
  const std::uint8_t* const input = static_cast<const std::uint8_t*>(p.input) + first_row * p.input_stride;
  const std::int8_t* weights = static_cast<const std::int8_t*>(p.weights) + panel * p.inputs * kPanel;
  const std::int8_t* next = static_cast<const std::int8_t*>(p.weights) + next_panel * p.inputs * kPanel;
  __m512i sums[Rows][kTileVectors];
  OFFRAMP_UNROLL
  for (int r = 0; r < Rows; ++r)
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) sums[r][v] = _mm512_setzero_si512();
  for (std::size_t k = 0; k < p.inputs; k += kByteGroup) {
    __m512i group[kTileVectors];
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) {
      group[v] = _mm512_loadu_si512(weights + v * 64);
      __builtin_prefetch(next + v * 64, 0, 2);
    }
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r) {
      std::int32_t four;
      __builtin_memcpy(&four, input + r * p.input_stride + k, sizeof four);
      const __m512i value = _mm512_set1_epi32(four);
      OFFRAMP_UNROLL
      for (std::size_t v = 0; v < kTileVectors; ++v) add_products(sums[r][v], value, group[v]);
    }
    weights += kByteGroup * kPanel;
    next += kByteGroup * kPanel;
  }
  Vector weight_step[kTileVectors], weight_total[kTileVectors];
  OFFRAMP_UNROLL
  for (std::size_t v = 0; v < kTileVectors; ++v) {
    const std::size_t place = panel * kPanel + v * Vector::width;
    weight_step[v] = Vector::load(p.weight_scale + place);
    weight_total[v] = Vector{_mm512_cvtepi32_ps(_mm512_loadu_si512(p.weight_sum + place))} * weight_step[v];
  }
  OFFRAMP_UNROLL
  for (int r = 0; r < Rows; ++r) {
    const float* const scale = p.input_scale + 2 * (first_row + r);
    const Vector step = Vector::all(scale[0]), offset = Vector::all(scale[1]);
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) {
      const Vector sum = {_mm512_cvtepi32_ps(sums[r][v])};
      finish(p, first_row + r, panel * kPanel + v * Vector::width,
             byte_sums_to_floats(sum, step, offset, weight_step[v], weight_total[v]));
    }
  }
}

template <int Rows>
inline void byte_rows(const MatrixProduct& p, std::size_t first_row, std::size_t rows, std::size_t panel,
                      std::size_t next_panel) {
  if (rows == Rows) {
    byte_tile<Rows>(p, first_row, panel, next_panel);
  } else if constexpr (Rows > 1) {
    byte_rows<Rows - 1>(p, first_row, rows, panel, next_panel);
  }
}

}  // namespace avx512_vnni

void avx512_vnni_product(const MatrixProduct& p) {
  using namespace avx512_vnni;
  for_tiles(p, [&](std::size_t first, std::size_t rows, std::size_t panel, std::size_t next) {
    byte_rows<kTileRows>(p, first, rows, panel, next);
  });
}

void avx512_vnni_quantise_row(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes,
                              float* scale) {
  using namespace avx512_vnni;
  const ByteScale own = byte_scale(row, count);
  scale[0] = own.step;
  scale[1] = own.lowest;
  const Vector factor = Vector::all(own.inverse), shift = Vector::all(-own.lowest * own.inverse);
  // Conversion rounds to the nearest; what rounding errors carry beyond 0 or 255 is brought back.
  const auto unsigned_bytes = [&](Vector values) {
    const __m512i levels = _mm512_cvtps_epi32(Vector::fma(values, factor, shift).v);
    return _mm512_cvtusepi32_epi8(_mm512_max_epi32(levels, _mm512_setzero_si512()));
  };
  std::size_t i = 0;
  for (; i + Vector::width <= count; i += Vector::width)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), unsigned_bytes(Vector::load(row + i)));
  if (i < padded) {  // the rest, and zeros behind it; less than a vector of both
    std::uint8_t last[Vector::width];
    const Vector rest = Vector::load_part(row + i, count - i, Vector::zero());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(last), unsigned_bytes(rest));
    for (std::size_t lane = 0; i + lane < padded; ++lane) bytes[i + lane] = last[lane];
  }
}

}  // namespace offramp

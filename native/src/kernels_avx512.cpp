// Kernels for processors with AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>

#include "kernels.h"

namespace offramp {
namespace avx512 {

constexpr int kTileRows = 12;
constexpr std::size_t kTileVectors = 2;
#include "vector_avx512.h"
#include "kernels_body.h"

}  // namespace avx512

const Kernels& avx512_kernels() {
  using namespace avx512;
  // Without VNNI, bytes are multiplied by the kernels of AVX2.
  static const Kernels table = {product_f32, nullptr,  avx2_kernels().product_i8, attend, avx2_kernels().quantise_row,
                                nullptr,     layer_norm, activate, add_to, max_to, dot};
  return table;
}

const Kernels& avx512_vnni_kernels() {
  static const Kernels table = [] {
    Kernels with_bytes = avx512_kernels();
    with_bytes.product_i8 = avx512_vnni_product;
    with_bytes.quantise_row = avx512_vnni_quantise_row;
    return with_bytes;
  }();
  return table;
}

const Kernels& avx512_bf16_kernels() {
  static const Kernels table = [] {
    Kernels with_halves = avx512_vnni_kernels();
    with_halves.product_bf16 = avx512_bf16_product;
    with_halves.round_row_bf16 = avx512_bf16_round_row;
    return with_halves;
  }();
  return table;
}

}  // namespace offramp

// Sixteen floats in one AVX-512 register. Included once in each file of kernels, inside that file's own namespace.

struct Vector {
  static constexpr std::size_t width = 16;
  __m512 v;

  static Vector zero() { return {_mm512_setzero_ps()}; }
  static Vector all(float value) { return {_mm512_set1_ps(value)}; }
  static Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
  // The first count floats (0 to width); the others are `rest`.
  static Vector load_part(const float* from, std::size_t count, Vector rest) {
    return {_mm512_mask_loadu_ps(rest.v, part(count), from)};
  }
  void store(float* to) const { _mm512_storeu_ps(to, v); }
  void store_part(float* to, std::size_t count) const { _mm512_mask_storeu_ps(to, part(count), v); }

  friend Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
  // The larger and the smaller one; b where either is NaN.
  static Vector max(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vector min(Vector a, Vector b) { return {_mm512_min_ps(a.v, b.v)}; }
  Vector abs() const { return {_mm512_abs_ps(v)}; }
  Vector rounded() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // this * 2^exponent, for whole exponents
  Vector scaled(Vector exponent) const { return {_mm512_scalef_ps(v, exponent.v)}; }
  static Vector where_negative(Vector condition, Vector yes, Vector no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(condition.v, _mm512_setzero_ps(), _CMP_LT_OQ), no.v, yes.v)};
  }
  friend Vector operator|(Vector a, Vector b) { return {_mm512_or_ps(a.v, b.v)}; }  // of the bits
  static Vector where_nan(Vector condition, Vector yes, Vector no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(condition.v, condition.v, _CMP_UNORD_Q), no.v, yes.v)};
  }
  // Lanes are added in pairs of neighbours at distance 8, 4, 2, 1: a fixed order.
  float sum() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  float smallest() const { return -(zero() - *this).largest(); }
  // Whole numbers between -128 and 127, stored as signed bytes.
  void store_bytes(std::int8_t* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  }

 private:
  static __mmask16 part(std::size_t count) { return static_cast<__mmask16>((1u << count) - 1u); }
};

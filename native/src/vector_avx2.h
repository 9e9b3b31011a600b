// Eight floats in one AVX register, with fused multiplication and addition. Included inside the namespace of a file.

struct Vector {
  static constexpr std::size_t width = 8;
  __m256 v;

  static Vector zero() { return {_mm256_setzero_ps()}; }
  static Vector all(float value) { return {_mm256_set1_ps(value)}; }
  static Vector load(const float* from) { return {_mm256_loadu_ps(from)}; }
  // The first count floats (0 to width); the others are `rest`.
  static Vector load_part(const float* from, std::size_t count, Vector rest) {
    const __m256i mask = part(count);
    return {_mm256_blendv_ps(rest.v, _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask))};
  }
  void store(float* to) const { _mm256_storeu_ps(to, v); }
  void store_part(float* to, std::size_t count) const { _mm256_maskstore_ps(to, part(count), v); }

  friend Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.v, b.v)}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
  // The larger and the smaller one; b where either is NaN.
  static Vector max(Vector a, Vector b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vector min(Vector a, Vector b) { return {_mm256_min_ps(a.v, b.v)}; }
  Vector abs() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v)}; }
  Vector rounded() const { return {_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // this * 2^exponent, for whole exponents between -126 and 127
  Vector scaled(Vector exponent) const {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(v, _mm256_castsi256_ps(bits))};
  }
  static Vector where_negative(Vector condition, Vector yes, Vector no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(condition.v, _mm256_setzero_ps(), _CMP_LT_OQ))};
  }
  friend Vector operator|(Vector a, Vector b) { return {_mm256_or_ps(a.v, b.v)}; }  // of the bits
  static Vector where_nan(Vector condition, Vector yes, Vector no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(condition.v, condition.v, _CMP_UNORD_Q))};
  }
  // Lanes are added in pairs of neighbours at distance 4, 2, 1: a fixed order.
  float sum() const {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  float largest() const {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  float smallest() const { return -(zero() - *this).largest(); }
  // Whole numbers between -128 and 127, stored as signed bytes.
  void store_bytes(std::int8_t* to) const {
    const __m256i whole = _mm256_cvtps_epi32(v);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
  }

 private:
  static __m256i part(std::size_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
  }
};

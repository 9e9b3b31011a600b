// Four floats in plain C++ that compilers turn into whatever the processor has. Included inside the namespace of a file.

struct Vector {
  static constexpr std::size_t width = 4;
  typedef float Lanes __attribute__((vector_size(16)));
  typedef std::int32_t Bits __attribute__((vector_size(16)));
  Lanes v;

  static Vector zero() { return all(0.0f); }
  static Vector all(float value) { return {Lanes{value, value, value, value}}; }
  static Vector load(const float* from) {
    Vector loaded;
    __builtin_memcpy(&loaded.v, from, sizeof loaded.v);
    return loaded;
  }
  // The first count floats (0 to width); the others are `rest`.
  static Vector load_part(const float* from, std::size_t count, Vector rest) {
    for (std::size_t i = 0; i < count; ++i) rest.v[i] = from[i];
    return rest;
  }
  void store(float* to) const { __builtin_memcpy(to, &v, sizeof v); }
  void store_part(float* to, std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) to[i] = v[i];
  }

  friend Vector operator+(Vector a, Vector b) { return {a.v + b.v}; }
  friend Vector operator-(Vector a, Vector b) { return {a.v - b.v}; }
  friend Vector operator*(Vector a, Vector b) { return {a.v * b.v}; }
  friend Vector operator/(Vector a, Vector b) { return {a.v / b.v}; }
  static Vector fma(Vector a, Vector b, Vector c) { return {a.v * b.v + c.v}; }  // in two steps, each rounded
  // The larger and the smaller one; b where either is NaN.
  static Vector max(Vector a, Vector b) { return {a.v > b.v ? a.v : b.v}; }
  static Vector min(Vector a, Vector b) { return {a.v < b.v ? a.v : b.v}; }
  Vector abs() const { return where_negative(*this, Vector{-v}, *this); }
  Vector rounded() const {
    Vector whole;
    for (std::size_t i = 0; i < width; ++i) whole.v[i] = __builtin_nearbyintf(v[i]);
    return whole;
  }
  // this * 2^exponent, for whole exponents between -126 and 127
  Vector scaled(Vector exponent) const {
    Vector product;
    for (std::size_t i = 0; i < width; ++i) {
      const float whole = exponent.v[i] == exponent.v[i] ? exponent.v[i] : 0.0f;  // NaN is no whole number; v is NaN too
      const std::int32_t bits = (static_cast<std::int32_t>(whole) + 127) * (1 << 23);
      float power;
      __builtin_memcpy(&power, &bits, sizeof power);
      product.v[i] = v[i] * power;
    }
    return product;
  }
  static Vector where_negative(Vector condition, Vector yes, Vector no) {
    return {condition.v < Lanes{0, 0, 0, 0} ? yes.v : no.v};
  }
  friend Vector operator|(Vector a, Vector b) { return {(Lanes)((Bits)a.v | (Bits)b.v)}; }  // of the bits
  static Vector where_nan(Vector condition, Vector yes, Vector no) {
    return {condition.v != condition.v ? yes.v : no.v};
  }
  float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
  float largest() const {
    float most = v[0];
    for (std::size_t i = 1; i < width; ++i) most = v[i] > most ? v[i] : most;
    return most;
  }
  float smallest() const { return -(zero() - *this).largest(); }
  // Whole numbers between -128 and 127, stored as signed bytes.
  void store_bytes(std::int8_t* to) const {
    for (std::size_t i = 0; i < width; ++i) to[i] = static_cast<std::int8_t>(v[i]);
  }
};

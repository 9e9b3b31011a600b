// Kernels in terms of `Vector`, written once. A file of kernels includes this inside its own namespace, after a vector
// header: code compiled for different instruction sets must never share a name, or the linker would mix it up.
// Nothing of the standard library is instantiated here for the same reason.
//
// NaN stays NaN in every kernel, so that a damaged model is noticed: where a maximum or minimum could drop it, the value
// that may be NaN stands second.
//
// The includer defines kTileRows and kTileVectors: the part of an output that is kept in registers.

static_assert(kPanel % (kTileVectors * Vector::width) == 0, "a panel is a whole number of tiles");
constexpr std::size_t kTileColumns = kTileVectors * Vector::width;

constexpr float kLog2OfE = 1.44269504f;

// 2^x, with a relative error below 1e-7; below -126 the smallest normal number; NaN of NaN. The coefficients are a fit of 2^r for
// |r| <= 1/2 with an error of 2e-9.
inline Vector power_of_two(Vector x) {
  x = Vector::min(Vector::all(127.0f), Vector::max(Vector::all(-126.0f), x));
  const Vector whole = x.rounded();
  const Vector rest = x - whole;
  Vector sum = Vector::all(1.53458095e-4f);
  sum = Vector::fma(sum, rest, Vector::all(1.33999309e-3f));
  sum = Vector::fma(sum, rest, Vector::all(9.61848907e-3f));
  sum = Vector::fma(sum, rest, Vector::all(5.55032864e-2f));
  sum = Vector::fma(sum, rest, Vector::all(2.40226462e-1f));
  sum = Vector::fma(sum, rest, Vector::all(6.93147182e-1f));
  sum = Vector::fma(sum, rest, Vector::all(1.0f));
  return sum.scaled(whole);
}

inline Vector exponential(Vector x) { return power_of_two(x * Vector::all(kLog2OfE)); }

inline Vector sigmoid(Vector x) {
  return Vector::all(1.0f) / (Vector::all(1.0f) + exponential(Vector::zero() - x));
}

inline Vector hyperbolic_tangent(Vector x) {
  return Vector::fma(Vector::all(2.0f), sigmoid(x + x), Vector::all(-1.0f));
}

// x * Φ(x), with the approximation 7.1.26 of the error function by Abramowitz and Stegun (absolute error 1.5e-7).
inline Vector gelu(Vector x) {
  const Vector y = x.abs() * Vector::all(0.70710678f);
  const Vector t = Vector::all(1.0f) / Vector::fma(y, Vector::all(0.3275911f), Vector::all(1.0f));
  Vector sum = Vector::all(1.061405429f);
  sum = Vector::fma(sum, t, Vector::all(-1.453152027f));
  sum = Vector::fma(sum, t, Vector::all(1.421413741f));
  sum = Vector::fma(sum, t, Vector::all(-0.284496736f));
  sum = Vector::fma(sum, t, Vector::all(0.254829592f));
  const Vector tail = sum * t * power_of_two(x * x * Vector::all(-0.5f * kLog2OfE));  // 1 - erf(y)
  const Vector half = x * Vector::all(0.5f) * tail;
  return Vector::where_negative(x, half, x - half);
}

inline Vector gelu_tanh(Vector x) {
  const Vector inner = Vector::fma(x * x * x, Vector::all(0.044715f), x) * Vector::all(1.5957691216f);  // 2·sqrt(2/π)
  return x * sigmoid(inner);
}

inline Vector activated(Activation activation, Vector x) {
  switch (activation) {
    case Activation::gelu: return gelu(x);
    case Activation::gelu_tanh: return gelu_tanh(x);
    case Activation::relu: return Vector::max(Vector::zero(), x);
    case Activation::tanh: return hyperbolic_tangent(x);
    case Activation::sigmoid: return sigmoid(x);
    case Activation::none: break;
  }
  return x;
}

void activate(Activation activation, float* row, std::size_t count) {
  std::size_t i = 0;
  for (; i + Vector::width <= count; i += Vector::width) activated(activation, Vector::load(row + i)).store(row + i);
  if (i < count) {
    activated(activation, Vector::load_part(row + i, count - i, Vector::zero())).store_part(row + i, count - i);
  }
}

// One value of an output on its way from the sums to memory.
inline void finish(const MatrixProduct& p, std::size_t row, std::size_t column, Vector sum) {
  Vector value = sum + Vector::load(p.bias + column);
  if (p.residual != nullptr) value = value + Vector::load(p.residual + row * p.residual_stride + column);
  value.store(p.output + row * p.output_stride + column);
}

// Sums of a tile: every output adds its products in the order of the inputs, whatever the height of the tile. Weights
// that will be needed next, at `next`, are fetched into the second-level cache meanwhile.
template <int Rows>
inline void sum_tile(const float* input, std::size_t input_stride, const float* weights, std::size_t weight_stride,
                     std::size_t inputs, const float* next, Vector (&sums)[Rows][kTileVectors]) {
  OFFRAMP_UNROLL
  for (int r = 0; r < Rows; ++r)
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) sums[r][v] = Vector::zero();
  for (std::size_t k = 0; k < inputs; ++k) {
    Vector column[kTileVectors];
    OFFRAMP_UNROLL
    for (std::size_t v = 0; v < kTileVectors; ++v) {
      column[v] = Vector::load(weights + v * Vector::width);
      __builtin_prefetch(next + v * Vector::width, 0, 2);
    }
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vector value = Vector::all(input[r * input_stride + k]);
      OFFRAMP_UNROLL
      for (std::size_t v = 0; v < kTileVectors; ++v) sums[r][v] = Vector::fma(value, column[v], sums[r][v]);
    }
    weights += weight_stride;
    next += weight_stride;
  }
}

// `next_panel` is the panel that will be needed after this tile, or the same one.
template <int Rows>
void product_tile(const MatrixProduct& p, std::size_t first_row, std::size_t panel, std::size_t next_panel) {
  const float* input = static_cast<const float*>(p.input) + first_row * p.input_stride;
  const float* weights = static_cast<const float*>(p.weights) + panel * p.inputs * kPanel;
  const float* next = static_cast<const float*>(p.weights) + next_panel * p.inputs * kPanel;
  for (std::size_t column = 0; column < kPanel; column += kTileColumns) {
    Vector sums[Rows][kTileVectors];
    sum_tile<Rows>(input, p.input_stride, weights + column, kPanel, p.inputs, next + column, sums);
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r)
      OFFRAMP_UNROLL
      for (std::size_t v = 0; v < kTileVectors; ++v)
        finish(p, first_row + r, panel * kPanel + column + v * Vector::width, sums[r][v]);
  }
}

// Calls the tile of the right height: heights are compile-time numbers so that sums stay in registers.
template <int Rows>
inline void product_rows(const MatrixProduct& p, std::size_t first_row, std::size_t rows, std::size_t panel,
                         std::size_t next_panel) {
  if (rows == Rows) {
    product_tile<Rows>(p, first_row, panel, next_panel);
  } else if constexpr (Rows > 1) {
    product_rows<Rows - 1>(p, first_row, rows, panel, next_panel);
  }
}

// Calls run(first_row, rows, panel, next_panel) for all tiles of a product, tiles of nearly equal heights.
template <class Run>
inline void for_tiles(const MatrixProduct& p, const Run& run) {
  const std::size_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  for (std::size_t panel = 0; panel < p.panels; ++panel) {
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::size_t first = tile * p.rows / tiles, last = (tile + 1) * p.rows / tiles;
      const bool moves_on = tile + 1 == tiles && panel + 1 < p.panels;
      run(first, last - first, panel, moves_on ? panel + 1 : panel);
    }
  }
}

void product_f32(const MatrixProduct& p) {
  for_tiles(p, [&](std::size_t first, std::size_t rows, std::size_t panel, std::size_t next) {
    product_rows<kTileRows>(p, first, rows, panel, next);
  });
}

// Rows of a small product with plain matrices: output[r] = input[r] · weights, columns in steps of a tile.
template <int Rows>
inline void small_product(const float* input, std::size_t input_stride, const float* weights, std::size_t weight_stride,
                          std::size_t inputs, float* output, std::size_t output_stride, std::size_t columns) {
  for (std::size_t column = 0; column < columns; column += kTileColumns) {
    Vector sums[Rows][kTileVectors];
    sum_tile<Rows>(input, input_stride, weights + column, weight_stride, inputs, weights + column, sums);
    OFFRAMP_UNROLL
    for (int r = 0; r < Rows; ++r)
      OFFRAMP_UNROLL
      for (std::size_t v = 0; v < kTileVectors; ++v)
        sums[r][v].store(output + r * output_stride + column + v * Vector::width);
  }
}

template <int Rows>
inline void small_product_rows(std::size_t rows, const float* input, std::size_t input_stride, const float* weights,
                               std::size_t weight_stride, std::size_t inputs, float* output, std::size_t output_stride,
                               std::size_t columns) {
  if (rows == Rows) {
    small_product<Rows>(input, input_stride, weights, weight_stride, inputs, output, output_stride, columns);
  } else if constexpr (Rows > 1) {
    small_product_rows<Rows - 1>(rows, input, input_stride, weights, weight_stride, inputs, output, output_stride,
                                 columns);
  }
}

// Softmax of count scores, each multiplied by scale first; filler behind them becomes 0. Where one of them is NaN or
// positive infinity, or all are negative infinity, the sum is NaN and with it every share.
inline void softmax(float* scores, std::size_t count, std::size_t padded, float scale) {
  const float binary_scale = scale * kLog2OfE;  // powers of two instead of e
  const Vector lowest = Vector::all(-__builtin_inff()), factor = Vector::all(binary_scale);
  Vector largest = lowest;
  for (std::size_t i = 0; i < count; i += Vector::width) {
    const std::size_t n = count - i < Vector::width ? count - i : Vector::width;
    largest = Vector::max(largest, Vector::load_part(scores + i, n, lowest));
  }
  const Vector shift = Vector::all(-largest.largest() * binary_scale);
  Vector total = Vector::zero();
  std::size_t i = 0;
  for (; i + Vector::width <= count; i += Vector::width) {
    const Vector power = power_of_two(Vector::fma(Vector::load(scores + i), factor, shift));
    power.store(scores + i);
    total = total + power;
  }
  if (i < count) {
    power_of_two(Vector::fma(Vector::load(scores + i), factor, shift)).store(scores + i);
    total = total + Vector::load_part(scores + i, count - i, Vector::zero());
  }
  const Vector share = Vector::all(1.0f / total.sum());
  for (i = 0; i < count; i += Vector::width) (Vector::load(scores + i) * share).store(scores + i);
  for (i = count; i < padded; ++i) scores[i] = 0.0f;
}

// Adds what the distance between a query and each key is worth, before the softmax multiplies scores by its scale.
inline void add_distance_bias(const HeadAttention& h, std::size_t query, float* scores) {
  const float inverse = 1.0f / h.scale;
  for (std::size_t key = 0; key < h.key_count; ++key) {
    std::int64_t distance = h.query_positions[query] - h.key_positions[key];
    distance = distance < -h.reach ? -h.reach : distance > h.reach ? h.reach : distance;
    scores[key] += h.distance_bias[distance + h.reach] * inverse;
  }
}

inline void note_scores(const HeadAttention& h, const float* shares, std::size_t query) {
  for (std::size_t key = 0; key < h.key_count; ++key) h.column_sums[key] += shares[key];
  if (h.same) {
    h.diagonal[query] = shares[query];
    return;
  }
  for (std::size_t key = 0; key < h.key_count; ++key) {
    if (h.key_positions[key] == h.query_positions[query]) h.diagonal[key] += shares[key];
  }
}

void attend(const HeadAttention& h) {
  const std::size_t padded_keys = round_up(h.key_count, kPanel), padded_width = round_up(h.width, kPanel);
  float* const keys = h.scratch;                                   // panels of 32 keys: [panels][width][kPanel]
  float* const values = keys + padded_keys * h.width;              // [key_count][padded_width]
  float* const shares = values + h.key_count * padded_width;       // [kQueryBlock][padded_keys]
  float* const mixed = shares + kQueryBlock * padded_keys;         // [kQueryBlock][padded_width]
  for (std::size_t panel = 0; panel < padded_keys; panel += kPanel) {
    float* const to = keys + panel * h.width;
    const std::size_t present = h.key_count - panel < kPanel ? h.key_count - panel : kPanel;
    for (std::size_t key = 0; key < present; ++key) {
      const float* from = h.keys + (panel + key) * h.key_stride;
      for (std::size_t i = 0; i < h.width; ++i) to[i * kPanel + key] = from[i];
    }
    for (std::size_t key = present; key < kPanel; ++key)
      for (std::size_t i = 0; i < h.width; ++i) to[i * kPanel + key] = 0.0f;
  }
  // Whole tiles of values are read where they lie; other widths are filled up with zeros first.
  const bool whole = h.width % kTileColumns == 0;
  if (!whole) {
    for (std::size_t key = 0; key < h.key_count; ++key)
      for (std::size_t i = 0; i < padded_width; ++i)
        values[key * padded_width + i] = i < h.width ? h.values[key * h.key_stride + i] : 0.0f;
  }
  static_assert(kTileRows <= kQueryBlock, "scratch holds the rows of a tile");
  const std::size_t tiles = (h.query_count + kTileRows - 1) / kTileRows;
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    const std::size_t first = tile * h.query_count / tiles, rows = (tile + 1) * h.query_count / tiles - first;
    for (std::size_t panel = 0; panel < padded_keys; panel += kPanel) {
      small_product_rows<kTileRows>(rows, h.queries + first * h.query_stride, h.query_stride, keys + panel * h.width,
                                    kPanel, h.width, shares + panel, padded_keys, kPanel);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      if (h.distance_bias != nullptr) add_distance_bias(h, first + r, shares + r * padded_keys);
      softmax(shares + r * padded_keys, h.key_count, padded_keys, h.scale);
      if (h.column_sums != nullptr) note_scores(h, shares + r * padded_keys, first + r);
    }
    float* const output = h.output + first * h.output_stride;
    if (whole) {
      small_product_rows<kTileRows>(rows, shares, padded_keys, h.values, h.key_stride, h.key_count, output,
                                    h.output_stride, h.width);
      continue;
    }
    small_product_rows<kTileRows>(rows, shares, padded_keys, values, padded_width, h.key_count, mixed, padded_width,
                                  padded_width);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t i = 0; i < h.width; ++i) output[r * h.output_stride + i] = mixed[r * padded_width + i];
  }
}

void layer_norm(const float* row, std::size_t count, const float* weight, const float* bias, float epsilon,
                float* output) {
  const std::size_t whole = count / Vector::width * Vector::width, rest = count - whole;
  Vector total = Vector::zero();
  for (std::size_t i = 0; i < whole; i += Vector::width) total = total + Vector::load(row + i);
  if (rest != 0) total = total + Vector::load_part(row + whole, rest, Vector::zero());
  const float mean = total.sum() / static_cast<float>(count);
  const Vector middle = Vector::all(mean);
  Vector squares = Vector::zero();
  for (std::size_t i = 0; i < whole; i += Vector::width) {
    const Vector distance = Vector::load(row + i) - middle;
    squares = Vector::fma(distance, distance, squares);
  }
  if (rest != 0) {
    const Vector distance = Vector::load_part(row + whole, rest, middle) - middle;
    squares = Vector::fma(distance, distance, squares);
  }
  const float variance = squares.sum() / static_cast<float>(count);
  const Vector factor = Vector::all(1.0f / __builtin_sqrtf(variance + epsilon));
  for (std::size_t i = 0; i < whole; i += Vector::width) {
    const Vector normal = (Vector::load(row + i) - middle) * factor;
    Vector::fma(normal, Vector::load(weight + i), Vector::load(bias + i)).store(output + i);
  }
  if (rest != 0) {
    const Vector none = Vector::zero();
    const Vector normal = (Vector::load_part(row + whole, rest, none) - middle) * factor;
    const Vector result =
        Vector::fma(normal, Vector::load_part(weight + whole, rest, none), Vector::load_part(bias + whole, rest, none));
    result.store_part(output + whole, rest);
  }
}

void add_to(float* sum, const float* row, std::size_t count) {
  std::size_t i = 0;
  for (; i + Vector::width <= count; i += Vector::width) (Vector::load(sum + i) + Vector::load(row + i)).store(sum + i);
  for (; i < count; ++i) sum[i] += row[i];
}

void max_to(float* largest, const float* row, std::size_t count) {
  std::size_t i = 0;
  for (; i + Vector::width <= count; i += Vector::width) {
    const Vector before = Vector::load(largest + i), own = Vector::load(row + i);
    Vector::where_nan(own, own, Vector::max(own, before)).store(largest + i);
  }
  for (; i < count; ++i) largest[i] = row[i] > largest[i] || row[i] != row[i] ? row[i] : largest[i];
}

float dot(const float* a, const float* b, std::size_t count) {
  Vector sums[4] = {Vector::zero(), Vector::zero(), Vector::zero(), Vector::zero()};
  std::size_t i = 0;
  for (; i + 4 * Vector::width <= count; i += 4 * Vector::width)
    for (std::size_t v = 0; v < 4; ++v)
      sums[v] = Vector::fma(Vector::load(a + i + v * Vector::width), Vector::load(b + i + v * Vector::width), sums[v]);
  for (; i < count; i += Vector::width) {
    const std::size_t n = count - i < Vector::width ? count - i : Vector::width;
    const Vector none = Vector::zero();
    sums[0] = Vector::fma(Vector::load_part(a + i, n, none), Vector::load_part(b + i, n, none), sums[0]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
}

// Rows are rounded to 256 levels between their smallest and largest value: value = lowest + step * level.
// Of a row with NaN or infinity the scale is NaN, and with it whatever its bytes are multiplied with.
struct ByteScale {
  float lowest, step, inverse;  // the inverse of the step; both are 0 where all values are equal
};

inline ByteScale byte_scale(const float* row, std::size_t count) {
  const Vector first = Vector::all(row[0]);
  Vector largest = first, smallest = first, nothing = Vector::zero();
  for (std::size_t i = 0; i < count; i += Vector::width) {
    const std::size_t n = count - i < Vector::width ? count - i : Vector::width;
    const Vector values = n == Vector::width ? Vector::load(row + i) : Vector::load_part(row + i, n, first);
    largest = Vector::max(largest, values);
    smallest = Vector::min(smallest, values);
    nothing = nothing | values * Vector::zero();  // ±0, or NaN from the first value on that is not finite
  }
  const float lowest = smallest.smallest() + nothing.sum(), range = largest.largest() - lowest;
  return {lowest, range / 255.0f, range > 0.0f ? 255.0f / range : 0.0f};
}

// Levels as signed bytes, smaller by 128.
inline void store_quantised(const float* row, std::size_t count, std::size_t padded, std::uint8_t* bytes, float* scale) {
  const ByteScale own = byte_scale(row, count);
  scale[0] = own.step;
  scale[1] = own.lowest + 128.0f * own.step;
  const Vector factor = Vector::all(own.inverse), shift = Vector::all(-own.lowest * own.inverse - 128.0f);
  const Vector most = Vector::all(127.0f), least = Vector::all(-128.0f);
  const auto whole_number = [&](Vector value) {  // NaN becomes a byte: the scale is NaN already
    return Vector::min(Vector::max(Vector::fma(value, factor, shift).rounded(), least), most);
  };
  std::size_t i = 0;
  for (; i + Vector::width <= count; i += Vector::width)
    whole_number(Vector::load(row + i)).store_bytes(reinterpret_cast<std::int8_t*>(bytes + i));
  if (i < count) {
    std::int8_t last[Vector::width];
    whole_number(Vector::load_part(row + i, count - i, Vector::zero())).store_bytes(last);
    for (std::size_t lane = 0; i + lane < count; ++lane) bytes[i + lane] = static_cast<std::uint8_t>(last[lane]);
  }
  for (i = count; i < padded; ++i) bytes[i] = 0;
}

// What sums of bytes are worth: sum of input * weight = step * weight step * sum + offset * (sum of the weights).
inline Vector byte_sums_to_floats(Vector sums, Vector step, Vector offset, Vector weight_step, Vector weight_total) {
  return Vector::fma(sums, step * weight_step, offset * weight_total);
}

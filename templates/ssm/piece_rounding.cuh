// What an 8-bit row is stored with.
struct RowScale {
  float stored = 0.f;   // what a stored integer is multiplied with
  float inverse = 0.f;  // what takes a value to integers, after `lift`
  float lift = 1.f;     // brings rows of tiny values to where their inverse is finite
};

// Rounds four values to quad q of a piece. `random` is used where `stochastic`, `scale` by 8-bit rows.
__device__ __forceinline__ void round_quad(Piece<float>& p, int q, const float* s, uint4, bool, const RowScale&) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p.w[4 * q + i] = __float_as_uint(s[i]);
}
template <typename T>
__device__ __forceinline__ void round_quad_16(Piece<T>& p, int q, const float* s, uint4 random, bool stochastic) {
  if (stochastic) {
    p.w[2 * q] = pack2(round_to(s[0], random.x, true, T()), round_to(s[1], random.y, true, T()));
    p.w[2 * q + 1] = pack2(round_to(s[2], random.z, true, T()), round_to(s[3], random.w, true, T()));
  } else {
    p.w[2 * q] = pack2(s[0], s[1], T());
    p.w[2 * q + 1] = pack2(s[2], s[3], T());
  }
}
__device__ __forceinline__ void round_quad(Piece<__nv_bfloat16>& p, int q, const float* s, uint4 random,
                                           bool stochastic, const RowScale&) {
  round_quad_16(p, q, s, random, stochastic);
}
__device__ __forceinline__ void round_quad(Piece<__half>& p, int q, const float* s, uint4 random, bool stochastic,
                                           const RowScale&) {
  round_quad_16(p, q, s, random, stochastic);
}

// A value in steps of its row's scale, to the nearest integer or, where stochastic, to one of its two neighbours: -127
// to 127 in the low byte.
__device__ __forceinline__ uint32_t to_steps(float v, uint32_t random, bool stochastic, const RowScale& scale) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum's low bits are the integer
  v *= scale.lift;
  if (!stochastic) return __float_as_uint(fmaf(v, scale.inverse, kRound)) & 0xffu;
  const float below = floorf(fmaf(v, scale.inverse, static_cast<float>(random >> 8) * 0x1p-24f));
  return __float_as_uint(fminf(below, 127.f) + kRound) & 0xffu;
}
__device__ __forceinline__ void round_quad(Piece<int8_t>& p, int q, const float* s, uint4 random, bool stochastic,
                                           const RowScale& scale) {
  p.w[q] = to_steps(s[0], random.x, stochastic, scale) | to_steps(s[1], random.y, stochastic, scale) << 8 |
           to_steps(s[2], random.z, stochastic, scale) << 16 | to_steps(s[3], random.w, stochastic, scale) << 24;
}

// The scale that takes a row's largest magnitude to 127, from the bits of that magnitude: as integers they order NaN
// above infinity, so that neither is lost.
__device__ __forceinline__ RowScale row_scale(uint32_t largest_bits) {
  const float largest = __uint_as_float(largest_bits);
  RowScale scale;
  scale.stored = largest / 127.f;
  if (scale.stored == 0.f) return scale;
  if (largest < 0x1p-100f) scale.lift = 0x1p64f;
  scale.inverse = 127.f / (largest * scale.lift);
  return scale;
}

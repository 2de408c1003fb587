// 8-bit rows: their scale, and numbers in and out of them.

// 1 / v with an error of 2^-22 of it, for normal numbers whose reciprocal is one.
__device__ __forceinline__ float reciprocal(float v) {
#if defined(SSM_EMULATOR)
  return 1.f / v;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
#endif
}

// The scale that takes a row's largest magnitude to 127, and what takes a value to steps of it. NaN and infinity are
// not lost. A row of zeros has scale 0; rows smaller than 2^-119 share the least scale that is a normal number.
__device__ __forceinline__ RowScale scale_of_largest(float largest) {
  const float least = largest < 0x1p-119f ? 0x1p-119f : largest;
  RowScale scale;
  scale.stored = least * (1.f / 127.f);
  scale.inverse = reciprocal(scale.stored);
  if (largest == 0.f) scale.stored = 0.f;
  return scale;
}

// The larger of two magnitudes, NaN if one is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
#if !defined(SSM_EMULATOR) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
#else
  // As integers NaN is above infinity.
  return __uint_as_float(max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu));
#endif
}

// Of a row of which each of kLanes lanes has kCount values.
template <int kLanes, int kCount>
__device__ __forceinline__ RowScale scale_of(const float (&s)[kCount]) {
  float largest = 0.f;
#pragma unroll
  for (int n = 0; n < kCount; ++n) largest = larger_magnitude(largest, s[n]);
#pragma unroll
  for (int bit = kLanes / 2; bit >= 1; bit /= 2) {
    largest = larger_magnitude(largest, __shfl_xor_sync(kWholeWarp, largest, bit));
  }
  return scale_of_largest(largest);
}

// Quad q of a piece as floats; integers are not scaled.
template <typename T>
__device__ __forceinline__ float4 widen_quad(const Piece<T>& p, int q) {
  if constexpr (sizeof(T) == 1) {
    // 2^23 + b as a float has b in its low byte: two instructions, where a conversion runs at a quarter of the rate.
    const uint32_t biased = p.w[q] ^ 0x80808080u;
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440 + k)) - 8388736.f;
    return make_float4(v[0], v[1], v[2], v[3]);
  } else {
    return quad_of(p, q);
  }
}

// Four values to the nearest numbers of quad q of a piece.
template <typename T>
__device__ __forceinline__ void round_nearest(Piece<T>& p, int q, const float* s, const RowScale& scale) {
  if constexpr (sizeof(T) == 1) {
    constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum's low byte is the integer
    uint32_t byte[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) byte[i] = __float_as_uint(fmaf(s[i], scale.inverse, kRound));
    p.w[q] = __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040), 0x5410);
  } else {
    round_quad(p, q, s, make_uint4(0u, 0u, 0u, 0u), false, scale);
  }
}

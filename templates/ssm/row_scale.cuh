// The scale of 8-bit rows, and rounding to nearest.

// The scale that takes a row's largest magnitude to 127. Rows smaller than 2^-120 or so share one, whose inverse is
// finite still; their steps are 2^-127. NaN and infinity are not lost. A row of zeros has scale 0.
__device__ __forceinline__ RowScale scale_of_largest(float largest) {
  constexpr float kLeast = 0x1p-120f;
  const float bounded = largest < kLeast ? kLeast : largest;
  RowScale scale;
  scale.stored = largest == 0.f ? 0.f : bounded / 127.f;
  scale.inverse = 127.f / bounded;
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

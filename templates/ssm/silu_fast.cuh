// z * sigmoid(z), to a few units in the last place.
__device__ __forceinline__ float silu_fast(float z) {
  const float divisor = 1.f + fminf(exp2_fast(-1.44269504f * z), 0x1p125f);
#if defined(SSM_EMULATOR)
  return z / divisor;
#else
  return __fdividef(z, divisor);
#endif
}

// 2^v by the special-function unit, to two units in the last place; subnormal inputs count as 0 and subnormal
// results become 0.
__device__ __forceinline__ float exp2_fast(float v) {
#if defined(SSM_EMULATOR)
  const float power = exp2f(v);
  return power < 0x1p-126f ? 0.f : power;
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
#endif
}

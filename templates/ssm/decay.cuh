// What Mamba-1 computes for every channel and token: straight code, so that several can be in flight at once.
constexpr float kLog2e = 1.4426950408889634f;

// 2^x to 2 units in the last place, one instruction; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
#if defined(SSM_EMULATOR)
  const float v = exp2f(x);
  return v < 0x1p-126f ? 0.f : v;
#else
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
#endif
}

// 1 / x to 1 unit in the last place, one instruction; results below 2^-126 become 0.
__device__ __forceinline__ float reciprocal_approx(float x) {
#if defined(SSM_EMULATOR)
  const float v = 1.f / x;
  return v < 0x1p-126f ? 0.f : v;
#else
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
#endif
}

// log1p(exp(d)) where d <= 20, else d: the bits of `step_size`, without its branches.
__device__ __forceinline__ float softplus(float d) {
  const bool curved = d <= 20.f;
  const float u = expf(curved ? d : 0.f);
#if !defined(SSM_EMULATOR)
  // 0 <= u <= exp(20): log1pf need not look for infinity and NaN.
  __builtin_assume(__float_as_uint(u) < 0x7f800000u);
#endif
  const float bent = log1pf(u);
  return curved ? bent : d;
}

// z * sigmoid(z), to a relative (|z| + 4) 2^-23: roundings of the exponent, of the power and of the reciprocal. The
// power is kept where its reciprocal is a normal number.
__device__ __forceinline__ float gate(float z) {
  return z * reciprocal_approx(1.f + exp2_approx(fminf(z * -kLog2e, 125.f)));
}

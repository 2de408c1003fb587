// Sums in two floats (Dekker 1971, Knuth's two-sum): some 48 bits, so that the difference of two long sums has the
// digits of an f32 even where one token's term is millions of times another's.
struct alignas(8) Sum {
  float high, low;
};

__device__ __forceinline__ Sum add(Sum a, Sum b) {
  const float sum = a.high + b.high, of_b = sum - a.high;
  const float lost = (a.high - (sum - of_b)) + (b.high - of_b) + (a.low + b.low);
  const float high = sum + lost;
  return Sum{high, lost - (high - sum)};
}

__device__ __forceinline__ float difference(Sum a, Sum b) { return (a.high - b.high) + (a.low - b.low); }

constexpr float kLog2E = 1.44269502f, kLog2ELow = 1.92596303e-8f;  // log2(e) in two floats

// d * rate, rate being in two floats. Kept finite, so that differences of sums stay numbers.
__device__ __forceinline__ Sum exponent(float d, float rate, float rate_low) {
  const float high = d * rate, low = fmaf(d, rate, -high) + d * rate_low;
  return fabsf(high) <= 1e30f ? Sum{high, low} : Sum{copysignf(1e30f, high), 0.f};
}

// a / b for numbers below kShort, by one reciprocal. NOTE: exact. With a half added no quotient is nearer to a whole
// number than 1 / 2b, and an error of 2^-22 of it, which is what the instruction may have, is less than that.
constexpr int64_t kShort = 1 << 21;
__device__ __forceinline__ uint32_t divide_short(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

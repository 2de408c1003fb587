// Unsigned integers of the size of a storage type.
template <int kBytes>
struct BitsOf {
  using type = uint32_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<1> {
  using type = uint8_t;
};

// An element from its bits, the low ones of a word.
__device__ __forceinline__ float element_of(uint32_t bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ __nv_bfloat16 element_of(uint32_t bits, __nv_bfloat16) {
  __nv_bfloat16_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __nv_bfloat16(raw);
}
__device__ __forceinline__ __half element_of(uint32_t bits, __half) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half(raw);
}

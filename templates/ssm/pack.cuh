__device__ __forceinline__ uint32_t pack2(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162_raw raw = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ uint32_t pack2(float low, float high, __half) {
  const __half2_raw raw = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ uint32_t pack2(__nv_bfloat16 low, __nv_bfloat16 high) {
  return static_cast<uint32_t>(__nv_bfloat16_raw(low).x) | static_cast<uint32_t>(__nv_bfloat16_raw(high).x) << 16;
}
__device__ __forceinline__ uint32_t pack2(__half low, __half high) {
  return static_cast<uint32_t>(__half_raw(low).x) | static_cast<uint32_t>(__half_raw(high).x) << 16;
}

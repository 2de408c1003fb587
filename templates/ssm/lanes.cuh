// Sums over the lanes that share a row: column bits from high to low, whatever the number of lanes.
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Sum of per-quad products in the fixed order: halves of the next power of two, from the highest bit down.
template <int kCount>
__device__ __forceinline__ float sum_quads(float (&v)[kCount]) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    constexpr int kHalf = kCount > 8 ? 8 : kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    static_assert(kCount <= 2 * kHalf, "a lane owns at most 16 quads");
    float folded[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) folded[i] = i + kHalf < kCount ? v[i] + v[i + kHalf] : v[i];
    return sum_quads(folded);
  }
}

// kValues sums over kLanes lanes at once: at each step a lane keeps half of its values and sends its partner the other
// half, so that a sum costs about one shuffle. Lane l is left with out[0 .. max(1, kValues / kLanes)), the sums from
// index first_sum<kLanes, kValues>(l) on. kValues is a power of two.
template <int kLanes, int kValues, int kSize>
__device__ __forceinline__ void sum_lanes_scattered(float (&v)[kSize], int lane) {
  if constexpr (kLanes > 1 && kValues > 1) {
    constexpr int kHalf = kValues / 2;
    const bool upper = lane & (kLanes / 2);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = upper ? v[i] : v[i + kHalf];
      const float keep = upper ? v[i + kHalf] : v[i];
      v[i] = keep + __shfl_xor_sync(kWholeWarp, send, kLanes / 2);
    }
    sum_lanes_scattered<kLanes / 2, kHalf>(v, lane);
  } else if constexpr (kLanes > 1) {
    v[0] = v[0] + __shfl_xor_sync(kWholeWarp, v[0], kLanes / 2);
    sum_lanes_scattered<kLanes / 2, 1>(v, lane);
  }
}

template <int kLanes, int kValues>
__device__ __forceinline__ int first_sum(int lane) {
  if constexpr (kLanes > 1 && kValues > 1) {
    return (lane & (kLanes / 2) ? kValues / 2 : 0) + first_sum<kLanes / 2, kValues / 2>(lane);
  } else {
    return 0;
  }
}

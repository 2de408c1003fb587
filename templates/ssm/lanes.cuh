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

template <int kLanes>
__device__ __forceinline__ float sum_lanes(float v) {
#pragma unroll
  for (int bit = kLanes / 2; bit >= 1; bit /= 2) v = v + __shfl_xor_sync(kWholeWarp, v, bit);
  return v;
}

// Begins kValues sums over kLanes lanes at once: at each step a lane keeps half of its values and sends its partner the
// other half, so that a sum costs about one shuffle. Each lane is left with v[0], its share of the sum of index
// folded_index<kLanes, kValues>(lane), which kLanes / kValues neighbouring lanes have yet to add up.
template <int kLanes, int kValues, int kSize>
__device__ __forceinline__ void fold_lanes(float (&v)[kSize], int lane) {
  if constexpr (kValues > 1) {
    constexpr int kHalf = kValues / 2, kBit = kLanes / 2;
    const bool upper = lane & kBit;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = upper ? v[i] : v[i + kHalf];
      const float keep = upper ? v[i + kHalf] : v[i];
      v[i] = keep + __shfl_xor_sync(kWholeWarp, send, kBit);
    }
    fold_lanes<kBit, kHalf>(v, lane);
  }
}

template <int kLanes, int kValues>
__device__ __forceinline__ int folded_index(int lane) {
  return lane % kLanes / (kLanes / kValues);
}

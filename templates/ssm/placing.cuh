#include "short_division.cuh"

// Whether the divisions of `find_short_work` and `short_group_of` are of short numbers.
__device__ __forceinline__ bool is_short_work(const ScanArgs& a, int64_t item, uint32_t runs) {
  return item < kShort && static_cast<uint64_t>(a.heads) * max(runs, static_cast<uint32_t>(a.groups)) < kShort;
}

// Where an item of work lies, by two divisions that do not wait for each other: `find_work` has one after the other,
// and of integers, which a launch of microseconds feels. With head_dim known when this is compiled one is a shift.
__device__ __forceinline__ Work find_short_work(const ScanArgs& a, uint32_t item, int rows, uint32_t runs) {
  const uint32_t heads = static_cast<uint32_t>(a.heads);
  const uint32_t row_of_heads = kHeadDim ? item / runs : divide_short(item, runs);
  uint32_t entry;
  if (kHeadDim && (heads & (heads - 1)) == 0) {
    entry = row_of_heads >> (31 - __clz(heads));  // the usual number of heads
  } else {
    entry = divide_short(item, heads * runs);
  }
  Work w;
  w.entry = entry;
  w.head = static_cast<int>(row_of_heads - entry * heads);
  w.row0 = static_cast<int>(item - row_of_heads * runs) * rows;
  return w;
}

// The group of a head, h / (heads / groups) in one division.
__device__ __forceinline__ uint32_t short_group_of(const ScanArgs& a, int head) {
  return divide_short(static_cast<uint32_t>(head) * a.groups, a.heads);
}
__device__ __forceinline__ int64_t group_of(const ScanArgs& a, int head) {
  return static_cast<int64_t>(head) * a.groups / a.heads;
}

// Where an item of work lies, by two divisions that do not wait for each other: `find_work` has one after the other,
// which a launch of microseconds feels. With head_dim known when this is compiled one of them is a shift.
__device__ __forceinline__ Work find_work_at_once(const ScanArgs& a, int64_t item, int rows, int head_dim) {
  const uint32_t runs = (head_dim + rows - 1u) / rows;
  const uint32_t of_entry = a.heads * runs;
  if (item > 0xffffffffll) return find_work(a, item, rows);
  const uint32_t short_item = static_cast<uint32_t>(item);
  const uint32_t entry = short_item / of_entry;
  const uint32_t row_of_heads = short_item / runs;
  Work w;
  w.entry = entry;
  w.head = static_cast<int>(row_of_heads - entry * a.heads);
  w.row0 = static_cast<int>(short_item - row_of_heads * runs) * rows;
  return w;
}

// A value that the compiler knows nothing of from here on: what it is worked out from comes before, and what is worked
// out from it stays behind, so that neither gets between a load and those that wait for it.
template <typename T>
__device__ __forceinline__ T opaque(T v) {
#if !defined(SSM_EMULATOR)
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(v));
  } else {
    asm volatile("" : "+r"(v));
  }
#endif
  return v;
}

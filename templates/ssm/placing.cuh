// a / b for numbers below kShort, by one reciprocal. NOTE: exact. With a half added no quotient is nearer to a whole
// number than 1 / 2b, and an error of 2^-22 of it, which is what the instruction may have, is less than that.
constexpr int64_t kShort = 1 << 21;
__device__ __forceinline__ uint32_t divide_short(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Where an item of work lies, by two divisions that do not wait for each other: `find_work` has one after the other,
// and of integers, which a launch of microseconds feels. With head_dim known when this is compiled one is a shift.
__device__ __forceinline__ Work find_work_at_once(const ScanArgs& a, int64_t item, int rows, int head_dim) {
  const uint32_t runs = (head_dim + rows - 1u) / rows;
  const int64_t of_entry = static_cast<int64_t>(a.heads) * runs;
  if (__builtin_expect(item >= kShort || of_entry >= kShort, false)) return find_work(a, item, rows);
  const uint32_t short_item = static_cast<uint32_t>(item), heads = static_cast<uint32_t>(a.heads);
  const uint32_t row_of_heads = kHeadDim ? short_item / runs : divide_short(short_item, runs);
  uint32_t entry;
  if (kHeadDim && (heads & (heads - 1)) == 0) {
    entry = row_of_heads >> (31 - __clz(heads));  // the usual number of heads
  } else {
    entry = divide_short(short_item, static_cast<uint32_t>(of_entry));
  }
  Work w;
  w.entry = entry;
  w.head = static_cast<int>(row_of_heads - entry * a.heads);
  w.row0 = static_cast<int>(short_item - row_of_heads * runs) * rows;
  return w;
}

// The group of a head, h / (heads / groups) in one division.
__device__ __forceinline__ int64_t group_of(const ScanArgs& a, int head) {
  const int64_t scaled = static_cast<int64_t>(head) * a.groups;
  if (__builtin_expect(scaled >= kShort || a.heads >= kShort, false)) return scaled / a.heads;
  return divide_short(static_cast<uint32_t>(scaled), static_cast<uint32_t>(a.heads));
}

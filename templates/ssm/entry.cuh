#include "entry_numbers.cuh"

// NOTE: the compiler is not to know that every lane has the same numbers: in registers that a warp shares it would move
// each as soon as it is asked for, and wait there before it asks for the next.
__device__ __forceinline__ Entry load_entry(const ScanArgs& a, int64_t entry) {
  Entry e;
  const int zero = opaque(0);
  const int s = sequence_of(a, static_cast<int>(entry) + zero);
  const bool there = s >= 0 && s < a.sequences;
  if (there) e.read = s, e.end = a.tokens;
  e.resume = there && a.state;
  if (there && a.read_slots) e.read = a.read_slots[s];
  if (there && a.state && a.resume) e.resume = a.resume[s];
  if (there && a.cu_seqlens) e.begin = a.cu_seqlens[s], e.end = a.cu_seqlens[s + 1];
  if (there && a.write_slots) e.write = a.write_slots[s];
  e.last = a.tokens;
  if (a.cu_seqlens) e.last = a.cu_seqlens[a.sequences + zero];
  return e;
}

#include "entry_meaning.cuh"

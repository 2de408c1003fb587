#include "entry_numbers.cuh"

// Of sequence s, which is there. `zero` is 0.
__device__ __forceinline__ Entry load_entry_of(const ScanArgs& a, uint32_t s, uint32_t zero) {
  s += zero;
  Entry e;
  e.read = static_cast<int>(s), e.end = a.tokens, e.last = a.tokens, e.resume = a.state != nullptr;
  if (a.read_slots) e.read = a.read_slots[s];
  if (a.cu_seqlens) e.begin = a.cu_seqlens[s], e.end = a.cu_seqlens[s + 1];
  if (a.write_slots) e.write = a.write_slots[s];
  if (a.state && a.resume) e.resume = a.resume[s];
  if (a.cu_seqlens) e.last = a.cu_seqlens[a.sequences + zero];
  return e;
}

// NOTE: the compiler is not to know that every lane has the same numbers: in registers that a warp shares it would move
// each as soon as it is asked for, and wait there before it asks for the next. The number of a thread's block among
// those of a block, which is 0, it does not look through.
__device__ __forceinline__ uint32_t unknown_zero() { return threadIdx.x / kThreads; }

__device__ __forceinline__ Entry load_entry(const ScanArgs& a, int64_t entry) {
  const int s = sequence_of(a, static_cast<int>(entry));
  if (s >= 0 && s < a.sequences) return load_entry_of(a, s, 0);
  return Entry();
}

// Tokens from here on belong to no sequence.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  return a.cu_seqlens ? min(max(a.cu_seqlens[a.sequences], 0), a.tokens) : a.tokens;
}

#include "entry_meaning.cuh"

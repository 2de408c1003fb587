#include "opaque.cuh"
// The numbers of one entry of a launch's sequence list, asked for together, so that they are waited for once. What they
// mean for the state and for the rest are questions of their own: the state's loads wait for no other answer.
struct Entry {
  int begin = 0;   // first token
  int end = 0;     // one past the last token
  int read = -1;   // slots as the lists say
  int write = -1;  // where there is no list, unused
  int resume = 0;  // not 0: the state goes on from the read slot
  int last = 0;    // one past the last token of all sequences
};

// The sequence that an entry of the list visits, out of range: nothing.
__device__ __forceinline__ int sequence_of(const ScanArgs& a, int entry) {
  if (!a.sequence_order) return entry;
  return entry < a.sequences ? a.sequence_order[entry] : -1;
}

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

__device__ __forceinline__ bool in_pool(const ScanArgs& a, int64_t slot) {
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(a.slots);
}

// Slot of the initial state, -1: start from zero.
__device__ __forceinline__ int initial_slot(const ScanArgs& a, const Entry& e) {
  return e.resume && e.read != a.pad_slot && in_pool(a, e.read) ? e.read : -1;
}

// Slot that the lists give the final state, -1: discard it.
__device__ __forceinline__ int listed_write(const ScanArgs& a, const Entry& e) {
  return !a.state ? -1 : a.write_slots ? e.write : e.read;
}

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding. An entry out of range is padding without tokens.
__device__ __forceinline__ bool is_padding(const ScanArgs& a, const Entry& e) {
  const int write = listed_write(a, e);
  return e.read == a.pad_slot || (e.resume && !in_pool(a, e.read)) || (write != -1 && !in_pool(a, write));
}

// Slot of the final state: an empty sequence that would write back what it read leaves the slot alone.
__device__ __forceinline__ int final_slot(const ScanArgs& a, const Entry& e, int initial) {
  const int write = listed_write(a, e);
  return e.end <= e.begin && initial == write ? -1 : write;
}

// A condition of an entry's numbers, which is the same on every lane, as one that the compiler knows to be so.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(kWholeWarp, condition); }

#include "unused.cuh"

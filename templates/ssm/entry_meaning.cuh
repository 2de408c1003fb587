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

#include "entries.cuh"

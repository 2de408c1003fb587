// What one entry of a launch's sequence list has to do.
struct Sequence {
  int begin = 0;         // first token
  int end = 0;           // one past the last token
  int64_t read = -1;     // slot of the initial state, -1: start from zero
  int64_t write = -1;    // slot of the final state, -1: discard it
  bool padding = false;  // y rows become 0 and no state is touched
};

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding.
__device__ __forceinline__ Sequence find_sequence(const ScanArgs& a, int64_t entry) {
  Sequence q;
  if (entry >= a.sequences) return q;
  const int64_t s = a.sequence_order ? a.sequence_order[entry] : entry;
  if (s < 0 || s >= a.sequences) return q;
  const int begin = a.cu_seqlens ? a.cu_seqlens[s] : 0;
  const int end = a.cu_seqlens ? a.cu_seqlens[s + 1] : a.tokens;
  const int64_t read = a.read_slots ? a.read_slots[s] : s;
  const int64_t write = a.write_slots ? a.write_slots[s] : read;
  const bool resume = a.state && (a.resume ? a.resume[s] != 0 : true);
  q.begin = max(begin, 0);
  q.end = min(end, a.tokens);
  q.padding =
      read == a.pad_slot || (resume && (read < 0 || read >= a.slots)) || (a.state && (write < -1 || write >= a.slots));
  if (q.padding) return q;
  if (resume) q.read = read;
  if (a.state) q.write = write;
  // An empty sequence that would write back what it read leaves the slot alone.
  if (q.end <= q.begin && q.read == q.write) q.read = q.write = -1;
  return q;
}

#include "unused.cuh"

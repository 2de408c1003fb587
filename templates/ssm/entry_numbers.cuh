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

// Tokens from here on belong to no sequence: their rows of y become 0.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  if (!a.cu_seqlens) return a.tokens;
  return min(max(a.cu_seqlens[a.sequences], 0), a.tokens);
}

#include "entries.cuh"

// Tokens from here on belong to no sequence: their rows of y become 0.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  if (!a.cu_seqlens) return a.tokens;
  return min(max(a.cu_seqlens[a.sequences], 0), a.tokens);
}

// Entries of a launch's list: one a sequence; with none, one entry's blocks still clear the unused rows of y.
__device__ __forceinline__ int64_t entries_of(const ScanArgs& a) { return max(a.sequences, 1); }

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

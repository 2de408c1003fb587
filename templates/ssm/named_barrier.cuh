// Barriers by number between some warps of a block: who arrives goes on, who waits goes on once `threads` threads have
// come, with all that the arrived ones had stored. Whole warps only.
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(barrier, threads, 0);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void wait_at(int barrier, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(barrier, threads, 1);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

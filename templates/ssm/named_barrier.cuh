// Barriers by number, for some of a block's warps: a warp counts as 32 threads, and a phase of a barrier is over when
// `threads` have come to it. Number 0 is __syncthreads. One that arrives does not wait; what it did before is seen by
// those that wait. A barrier is come to again only when its phase before is known to be over.
__device__ __forceinline__ void barrier_wait(int number, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(number, threads, true);
#else
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(int number, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(number, threads, false);
#else
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

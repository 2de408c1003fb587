// Barriers by number between some warps of a block: who arrives goes on, who waits goes on once `threads` threads have
// come, with all that the arrived ones had stored. Whole warps only.
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(barrier, threads, 0);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}
// NOTE: `again` is false. The loop keeps what is computed before the wait before it: the assembler moves instructions
// past a barrier, but not into a loop.
__device__ __forceinline__ void wait_at(int barrier, int threads, bool again) {
#if defined(SSM_EMULATOR)
  emu_named_barrier(barrier, threads, 1);
#else
  asm volatile(
      "{\n.reg .pred again;\nsetp.ne.u32 again, %2, 0;\nWAIT:\nbar.sync %0, %1;\n@again bra WAIT;\n}" ::"r"(barrier),
      "r"(threads), "r"(static_cast<uint32_t>(again))
      : "memory");
#endif
}

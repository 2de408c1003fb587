// Closes a group of copies, and waits until at most kGroups of this thread's groups are on their way; a barrier must
// follow before other threads read what they brought.
__device__ __forceinline__ void close_copies() {
#if defined(SSM_EMULATOR)
  emu_cp_async_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
#if defined(SSM_EMULATOR)
  emu_cp_async_wait_group(kGroups);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

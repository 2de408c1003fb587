// The same, or sixteen bytes of zeros, for which nothing is read.
__device__ __forceinline__ void copy_async_16_or_zeros(void* shared, const void* global, bool there) {
#if defined(SSM_EMULATOR)
  if (there) {
    emu_cp_async(shared, global, 16);
  } else {
    *static_cast<uint4*>(shared) = make_uint4(0u, 0u, 0u, 0u);
  }
#else
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(there ? 16 : 0)
      : "memory");
#endif
}

// Closes a group of copies, and waits until at most so many of this thread's groups are in flight.
__device__ __forceinline__ void copy_async_commit() {
#if defined(SSM_EMULATOR)
  emu_cp_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
#if defined(SSM_EMULATOR)
  emu_cp_async_wait_group(kGroups);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

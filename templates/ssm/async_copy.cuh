// Sixteen bytes from global to shared memory without passing through registers (sm_80 and up).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if defined(SSM_EMULATOR)
  emu_cp_async(shared, global, 16);
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// Waits for this thread's own copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void copy_async_wait_all() {
#if defined(SSM_EMULATOR)
  emu_cp_async_commit();
  emu_cp_async_wait_group(0);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

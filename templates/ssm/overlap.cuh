// Programmatic dependent launch (sm_90 and up): the next launch may start while this one runs, and waits itself until
// this one has ended. Where a launch does not ask for it, neither does anything.
__device__ __forceinline__ void let_next_start() {
#if !defined(SSM_EMULATOR)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_launch_before() {
#if !defined(SSM_EMULATOR)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

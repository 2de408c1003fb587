// Moves registers between the warp groups of a block (sm_90a): those that give some up come first, and those that ask
// for more wait until there are as many. Each number is what a thread has from here on, a multiple of 8 from 24 to 256.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
#if !defined(SSM_EMULATOR)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void ask_for_registers() {
#if !defined(SSM_EMULATOR)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

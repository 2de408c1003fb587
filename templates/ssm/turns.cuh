// Barriers between two warps of a block, by number from 0: one arrives and goes on, the other waits until it has come,
// with all that it had stored. `round` is how often a warp has waited at its barriers before.
// NOTE: the multiprocessor's own barriers wake a warp 40 clocks sooner, barriers in shared memory take less of it where
// it is busy: 6 % of a prompt whose channels fill the device. Before sm_90 a warp would have to ask for them again and
// again.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kSharedBarriers = kThreads <= 256;
#else
constexpr bool kSharedBarriers = false;
#endif
constexpr int kBarriers = 16;

#if defined(SSM_EMULATOR)
__device__ __forceinline__ void begin_turns() {}
__device__ __forceinline__ void arrive_at(int barrier) { emu_named_barrier(barrier, 64, 0); }
__device__ __forceinline__ void wait_at(int barrier, uint32_t, bool) { emu_named_barrier(barrier, 64, 1); }
#else
__shared__ uint64_t turn_barriers[kSharedBarriers ? kBarriers : 1];

__device__ __forceinline__ uint32_t address_of(int barrier) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(turn_barriers + barrier));
}

// Before all else, by the whole block.
__device__ __forceinline__ void begin_turns() {
  if constexpr (kSharedBarriers) {
    if (threadIdx.x < kBarriers) {
      asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(address_of(threadIdx.x)) : "memory");
    }
    __syncthreads();
  }
}
__device__ __forceinline__ void arrive_at(int barrier) {
  if constexpr (kSharedBarriers) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address_of(barrier))
                 : "memory");
  } else {
    asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory");
  }
}
// NOTE: `again` is false. The loop keeps what is computed before the wait before it: the assembler moves instructions
// past a barrier, but not into a loop.
__device__ __forceinline__ void wait_at(int barrier, uint32_t round, bool again) {
  if constexpr (kSharedBarriers) {
    asm volatile(
        "{\n.reg .pred there;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 there, [%0], %1;\n@!there bra WAIT;\n}" ::"r"(
            address_of(barrier)),
        "r"(round & 1u)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred again;\nsetp.ne.u32 again, %1, 0;\nWAIT:\nbar.sync %0, 64;\n@again bra WAIT;\n}" ::"r"(barrier),
        "r"(static_cast<uint32_t>(again))
        : "memory");
  }
}
#endif

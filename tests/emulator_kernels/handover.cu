// A running sum over blocks: each waits for the flag of the block before it, adds its 32 values, hands over.
extern __shared__ __align__(16) float shared_memory[];

extern "C" __global__ void __launch_bounds__(32) ssm_handover(const __grid_constant__ ScanArgs a) {
  const int t = threadIdx.x, b = blockIdx.x;
  shared_memory[t] = a.x[b * 32 + t];
  if (t == 0 && b > 0)
    while (emu_ld_acquire(&a.flags[b - 1]) == 0) emu_yield();
  __syncthreads();  // acquired
  const float before = b > 0 ? a.workspace[(b - 1) * 32 + t] : 0.0f;
  a.workspace[b * 32 + t] = before + shared_memory[t];
  __syncthreads();  // stored
  if (t == 0) emu_st_release(&a.flags[b], 1u);
  a.y[b * 32 + t] = before + shared_memory[t];
}

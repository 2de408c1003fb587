// A running sum that goes round four warps of a block: each waits for the one before it by a barrier with a number, adds
// its 32 values and hands over. The slots are written again in each of n rounds.
extern __shared__ __align__(16) float shared_memory[];

extern "C" __global__ void __launch_bounds__(128) ssm_relay(const __grid_constant__ ScanArgs a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, next = (warp + 1) % 4;
  for (int round = 0; round < a.n; ++round) {
    if (warp + round > 0) emu_named_barrier(warp, 64, 1);  // wait
    const float sum = warp + round > 0 ? shared_memory[warp * 32 + lane] : 0.0f;
    shared_memory[next * 32 + lane] = sum + a.x[warp * 32 + lane];
    if (next > 0 || round + 1 < a.n) emu_named_barrier(next, 64, 0);  // hand over
    if (round + 1 == a.n) a.y[warp * 32 + lane] = sum + a.x[warp * 32 + lane];
  }
}

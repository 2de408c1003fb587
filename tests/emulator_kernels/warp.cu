// Each warp sums its 32 values of x in shared memory, ordered by __syncwarp alone; y gets the sum in every lane.
extern __shared__ __align__(16) float shared_memory[];

extern "C" __global__ void __launch_bounds__(64) ssm_warp(const __grid_constant__ ScanArgs a) {
  const int t = threadIdx.x, lane = t % 32;
  shared_memory[t] = a.x[t];
  __syncwarp();  // stored
  for (int half = 16; half; half /= 2) {
    if (lane < half) shared_memory[t] += shared_memory[t + half];
    __syncwarp();  // summed
  }
  const float sum = shared_memory[t - lane];
  __syncwarp();  // broadcast
  if (lane == 0) shared_memory[t] = 0.0f;
  a.y[t] = sum;
}

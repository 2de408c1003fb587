// y of each tile of 64 is x of the tile, reversed, through shared memory. Two tiles, so each barrier matters.
extern __shared__ __align__(16) float shared_memory[];

extern "C" __global__ void __launch_bounds__(64) ssm_reverse(const __grid_constant__ ScanArgs a) {
  for (int tile = 0; tile < a.n; ++tile) {
    const int base = (blockIdx.x * a.n + tile) * 64;
    shared_memory[threadIdx.x] = a.x[base + threadIdx.x];
    __syncthreads();  // stored
    a.y[base + threadIdx.x] = shared_memory[63 - threadIdx.x];
    __syncthreads();  // loaded
  }
}

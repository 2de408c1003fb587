// y of each tile of 64 is x of the tile, reversed, plus its first: two warps bring the tiles, in two places in turn, and
// two take them. They meet only at named barriers.
extern __shared__ __align__(16) float shared_memory[];
constexpr int kReady = 1, kTaken = 3, kAll = 128;

extern "C" __global__ void __launch_bounds__(128) ssm_stages(const __grid_constant__ ScanArgs a) {
  const int thread = threadIdx.x % 64;
  if (threadIdx.x < 64) {
    for (int tile = 0; tile < a.n; ++tile) {
      if (tile >= 2) barrier_wait(kTaken + tile % 2, kAll);
      shared_memory[tile % 2 * 64 + thread] = a.x[(blockIdx.x * a.n + tile) * 64 + thread];
      barrier_arrive(kReady + tile % 2, kAll);
    }
  } else {
    for (int tile = 0; tile < a.n; ++tile) {
      barrier_wait(kReady + tile % 2, kAll);
      const float* place = shared_memory + tile % 2 * 64;
      a.y[(blockIdx.x * a.n + tile) * 64 + thread] = place[63 - thread] + place[0];
      if (tile + 2 < a.n) barrier_arrive(kTaken + tile % 2, kAll);
    }
  }
}

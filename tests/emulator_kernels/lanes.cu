// Shuffles under full and partial masks, with widths and of 64-bit values; votes; all summed into exact integers.
extern "C" __global__ void __launch_bounds__(64) ssm_lanes(const __grid_constant__ ScanArgs a) {
  const int t = threadIdx.x, lane = t % 32;
  float v = a.x[t];
  for (int bit = 1; bit < 32; bit *= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);  // total
  double part = lane;
  if (lane < 8) part += __shfl_down_sync(0x000000ffu, part, 1, 8);  // partial
  else part += __shfl_up_sync(0xffffff00u, part, 1, 8);
  const int first = __shfl_sync(0xffffffffu, t, 0, 16);
  const unsigned odd = __ballot_sync(0xffffffffu, lane & 1);
  const int many = __syncthreads_count(t % 3 == 0) + 100 * __syncthreads_or(t == 5) + 1000 * __syncthreads_and(t < 64);
  a.y[t] = v + (float)part + (float)first + (odd == 0xaaaaaaaau ? 0.5f : 0.0f) + (float)many;
}

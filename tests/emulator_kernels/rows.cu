// y[row][i] = 2 x[row][i]: one block a row, rows of x and y `stride` floats apart, 16 floats each, one float4 a thread.
extern "C" __global__ void __launch_bounds__(4) ssm_rows(const __grid_constant__ ScanArgs a) {
  const float* x = a.x + blockIdx.x * a.stride;
  float* y = a.y + blockIdx.x * a.stride;
  const int i = 4 * threadIdx.x;
  float4 v = *reinterpret_cast<const float4*>(&x[i]);
  v.x *= 2.0f, v.y *= 2.0f, v.z *= 2.0f, v.w *= 2.0f;
  __stcs(reinterpret_cast<float4*>(&y[i]), v);
}

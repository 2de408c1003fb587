// One column at a time, where a lane's columns are not neighbours.
__device__ __forceinline__ float load_column(const State* row, int n) { return to_f32(row[n]); }

__device__ __forceinline__ void store_column(const Destination& to, int n, float v, int d_state, const Rounding& r) {
  uint32_t random = 0;
  if (r.stochastic) {
    const uint4 words = draw4(r, to.row_index, (d_state + 3) / 4, n / 4, to.slot, to.token);
    random = n % 4 == 0 ? words.x : n % 4 == 1 ? words.y : n % 4 == 2 ? words.z : words.w;
  }
  to.row[n] = round_to(v, random, r.stochastic, State());
}

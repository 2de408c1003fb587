// SPDX-License-Identifier: Apache-2.0
//
// ssm_recurrent_n128_l4_r32_c28_swizzled_f32_sf32
//
// The selective state-space scan of Mamba-2 (one A a head) and Mamba-1 (one A a column), token by token in the order
// of the recurrence. For token t of a sequence, head h, group g = h / (heads / groups), row p, column n:
//
//   d      = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//   y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * silu(z[t,h,p])
//
// Layout `swizzled`: a lane owns 32 contiguous columns of one row. Columns in groups of four are XOR-swizzled in
// shared memory, both B and C and the tile through which the state moves: the tile holds all rows of the block, takes
// more than 48 KiB where they need it, and its copy to registers has no bank conflicts.
//
// Launch: one block a (sequence, head, run of rows), runs of rows fastest:
//   grid.x = max(sequences, 1) * heads * ceil(head_dim / rows), at most 2^31 - 1 (blocks stride beyond that);
//   block.x = 128; dynamic shared memory = 32368 bytes; rows = 32.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused where fmaf says so and nowhere else, so that the order of rounding is what this file says.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = float;     // x, z, y, B, C
using State = float;  // the stored state; arithmetic is f32

constexpr int kDState = 128;  // columns of a row
constexpr int kLanes = 4;     // lanes that share a row
constexpr int kRows = 32;     // rows of a block
constexpr int kChunk = 28;    // tokens staged at a time
constexpr int kSlice = 32;    // columns a lane owns of a row
constexpr int kThreads = 128;

// The one argument of every entry. The order is frozen: NumPy (pyharness/args.py), Go and C mirror it.
// Pointers are device addresses, null where an optional array is absent. Strides are in elements.
struct ScanArgs {
  const void* x;                    // [tokens, heads, head_dim], io
  const void* z;                    // like x, optional gate
  void* y;                          // like x, output
  const void* dt;                   // [tokens, heads], io or f32
  const float* A;                   // [heads], or [heads, d_state] with kFlagPerColumnA
  const void* B;                    // [tokens, groups, d_state], io
  const void* C;                    // like B
  const float* D;                   // [heads], optional
  const float* dt_bias;             // [heads], optional
  void* state;                      // [slots, heads, head_dim, d_state]
  float* state_scale;               // [slots, heads, head_dim], 8-bit state only
  const int32_t* cu_seqlens;        // [sequences + 1], null: one sequence
  const int32_t* read_slots;        // [sequences], null: 0, 1, 2, ...
  const int32_t* write_slots;       // [sequences], null: read_slots
  const uint8_t* resume;            // [sequences], null: 1 where there is a state
  const int32_t* checkpoint_slots;  // [tokens], optional
  const int32_t* sequence_order;    // [sequences], optional: what entry i visits; out of range: nothing
  const uint64_t* rounding_key;     // {seed, step}, optional
  void* workspace;
  int64_t x_stride;
  int64_t z_stride;
  int64_t y_stride;
  int64_t dt_stride;
  int64_t B_stride;
  int64_t C_stride;
  int64_t state_stride;
  int64_t state_scale_stride;
  int64_t slots;
  int64_t workspace_bytes;
  int32_t tokens;
  int32_t sequences;
  int32_t heads;
  int32_t head_dim;
  int32_t groups;
  int32_t d_state;
  int32_t pad_slot;
  float dt_min;
  float dt_max;
  uint32_t flags;
  int32_t lanes;
  int32_t rows;
  int32_t chunk;
};

enum Flag : uint32_t {
  kFlagSoftplus = 1u << 0,
  kFlagPerColumnA = 1u << 1,
  kFlagDtF32 = 1u << 2,
  kFlagDtLimit = 1u << 3,
  // NOTE: "vector" means that base, outer stride and inner row length are multiples of 16 bytes. The host decides.
  kFlagVectorX = 1u << 4,
  kFlagVectorZ = 1u << 5,
  kFlagVectorY = 1u << 6,
  kFlagVectorB = 1u << 7,
  kFlagVectorC = 1u << 8,
  kFlagVectorState = 1u << 9,
};

static_assert(sizeof(ScanArgs) == 288, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, x) == 0, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, z) == 8, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, y) == 16, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt) == 24, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, A) == 32, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, B) == 40, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, C) == 48, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, D) == 56, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_bias) == 64, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state) == 72, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state_scale) == 80, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, cu_seqlens) == 88, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, read_slots) == 96, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, write_slots) == 104, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, resume) == 112, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, checkpoint_slots) == 120, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, sequence_order) == 128, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, rounding_key) == 136, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, workspace) == 144, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, x_stride) == 152, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, z_stride) == 160, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, y_stride) == 168, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_stride) == 176, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, B_stride) == 184, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, C_stride) == 192, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state_stride) == 200, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, state_scale_stride) == 208, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, slots) == 216, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, workspace_bytes) == 224, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, tokens) == 232, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, sequences) == 236, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, heads) == 240, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, head_dim) == 244, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, groups) == 248, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, d_state) == 252, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, pad_slot) == 256, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_min) == 260, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, dt_max) == 264, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, flags) == 268, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, lanes) == 272, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, rows) == 276, "ScanArgs is frozen");
static_assert(offsetof(ScanArgs, chunk) == 280, "ScanArgs is frozen");

// Global accesses that will not be used again soon.
template <typename T>
__device__ __forceinline__ T load_streaming(const T* p) {
  return __ldcs(p);
}
template <typename T>
__device__ __forceinline__ void store_streaming(T* p, T v) {
  __stcs(p, v);
}

// Storage types in and out of f32. Loads and stores of four go as one access.
__device__ __forceinline__ float to_f32(float v) { return v; }
__device__ __forceinline__ float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_f32(__half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T from_f32(float v);
template <>
__device__ __forceinline__ float from_f32<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_f32<__nv_bfloat16>(float v) {
  return __float2bfloat16(v);
}
template <>
__device__ __forceinline__ __half from_f32<__half>(float v) {
  return __float2half(v);
}

__device__ __forceinline__ float4 widen4(float4 v, float) { return v; }
__device__ __forceinline__ float4 widen4(uint2 v, __nv_bfloat16) {
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xffff0000u));
}
__device__ __forceinline__ float4 widen4(uint2 v, __half) {
  const __half2_raw low{static_cast<unsigned short>(v.x), static_cast<unsigned short>(v.x >> 16)};
  const __half2_raw high{static_cast<unsigned short>(v.y), static_cast<unsigned short>(v.y >> 16)};
  const float2 a = __half22float2(__half2(low)), b = __half22float2(__half2(high));
  return make_float4(a.x, a.y, b.x, b.y);
}

// Four elements as one word group: float4 for f32, uint2 for 16-bit types.
template <typename T>
struct Quad {
  using type = uint2;
};
template <>
struct Quad<float> {
  using type = float4;
};

template <typename T>
__device__ __forceinline__ float4 load4(const T* p) {
  return widen4(*reinterpret_cast<const typename Quad<T>::type*>(p), T());
}

// dt' of one token: bias, softplus and limits as the operation orders them. NaN passes through.
__device__ __forceinline__ float step_size(float dt, float bias, uint32_t flags, float dt_min, float dt_max) {
  float d = dt + bias;
  if ((flags & kFlagSoftplus) && d <= 20.f) d = log1pf(expf(d));
  if (flags & kFlagDtLimit) d = d < dt_min ? dt_min : (d > dt_max ? dt_max : d);
  return d;
}

__device__ __forceinline__ float load_dt(const ScanArgs& a, const void* dt_io, int64_t index) {
  return a.flags & kFlagDtF32 ? static_cast<const float*>(dt_io)[index] : to_f32(static_cast<const Io*>(dt_io)[index]);
}

__device__ __forceinline__ float silu(float z) { return z / (1.f + expf(-z)); }

// Rounding of stored states: to nearest, or stochastically with Philox 4x32-10 (Salmon et al., SC 2011) keyed by
// {seed, step} and counted by (element, slot, token), so that every launch configuration draws the same numbers.
struct Rounding {
  bool stochastic = false;
  uint32_t key0 = 0, key1 = 0, step = 0;
};

__device__ __forceinline__ Rounding find_rounding(const uint64_t* key) {
  Rounding r;
  if (key) {
    const uint64_t seed = key[0], step = key[1];
    r.stochastic = true;
    r.key0 = static_cast<uint32_t>(seed);
    r.key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(step >> 32);
    r.step = static_cast<uint32_t>(step);
  }
  return r;
}

__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    const uint32_t high1 = __umulhi(0xcd9e8d57u, counter.z), low1 = 0xcd9e8d57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return counter;
}

// Four random words for the columns [4 * quad, 4 * quad + 4) of one row of a slot.
__device__ __forceinline__ uint4 draw4(const Rounding& r, uint32_t row, uint32_t quads, uint32_t quad, int64_t slot,
                                       int token) {
  const uint4 counter =
      make_uint4(row * quads + quad, static_cast<uint32_t>(slot), static_cast<uint32_t>(token), r.step);
  return philox(counter, r.key0, r.key1);
}

__device__ __forceinline__ float round_to(float v, uint32_t, bool, float) { return v; }

__device__ __forceinline__ __nv_bfloat16 round_to(float v, uint32_t random, bool stochastic, __nv_bfloat16) {
  const uint32_t bits = __float_as_uint(v);
  if (!stochastic || (bits & 0x7f800000u) == 0x7f800000u) return __float2bfloat16(v);
  __nv_bfloat16_raw out;
  out.x = static_cast<unsigned short>((bits + (random & 0xffffu)) >> 16);
  return __nv_bfloat16(out);
}

__device__ __forceinline__ __half round_to(float v, uint32_t random, bool stochastic, __half) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu, sign = bits & 0x80000000u;
  const int exponent = static_cast<int>(magnitude >> 23);
  if (!stochastic || exponent == 255) return __float2half(v);
  if (exponent >= 113) {  // normal in f16: 13 mantissa bits go
    return __float2half(__uint_as_float(sign | ((magnitude + (random & 0x1fffu)) & ~0x1fffu)));
  }
  // Subnormal in f16: the quantum is 2^-24 whatever the exponent.
  uint32_t mantissa = exponent ? (magnitude & 0x7fffffu) | 0x800000u : magnitude << 1;
  int drop = 126 - exponent;
  if (drop > 31) {
    mantissa = drop - 31 < 32 ? mantissa >> (drop - 31) : 0u;
    drop = 31;
  }
  __half_raw out;
  out.x = static_cast<unsigned short>(((mantissa + (random & ((1u << drop) - 1u))) >> drop) | (sign >> 16));
  return __half(out);
}

// One row of a slot, in columns. `vector` says that four columns at a multiple of four may go as one access.
__device__ __forceinline__ float4 load_columns(const State* row, int n, int d_state, bool vector) {
  if (vector)
    return n < d_state ? widen4(load_streaming(reinterpret_cast<const Quad<State>::type*>(row + n)), State())
                       : make_float4(0.f, 0.f, 0.f, 0.f);
  float4 v;
  v.x = n + 0 < d_state ? to_f32(row[n + 0]) : 0.f;
  v.y = n + 1 < d_state ? to_f32(row[n + 1]) : 0.f;
  v.z = n + 2 < d_state ? to_f32(row[n + 2]) : 0.f;
  v.w = n + 3 < d_state ? to_f32(row[n + 3]) : 0.f;
  return v;
}

// Where a state goes: its slot, the row inside it ([heads * head_dim]) and the token that it follows.
struct Destination {
  State* row;
  uint32_t row_index;
  int64_t slot;
  int token;
};

__device__ __forceinline__ void store_columns(const Destination& to, int n, float4 v, int d_state, bool vector,
                                              const Rounding& r) {
  if (n >= d_state) return;
  uint4 random = make_uint4(0u, 0u, 0u, 0u);
  if (r.stochastic) random = draw4(r, to.row_index, (d_state + 3) / 4, n / 4, to.slot, to.token);
  alignas(16)
      State out[4] = {round_to(v.x, random.x, r.stochastic, State()), round_to(v.y, random.y, r.stochastic, State()),
                      round_to(v.z, random.z, r.stochastic, State()), round_to(v.w, random.w, r.stochastic, State())};
  if (vector) {
    store_streaming(reinterpret_cast<Quad<State>::type*>(to.row + n), *reinterpret_cast<Quad<State>::type*>(out));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < d_state) to.row[n + i] = out[i];
  }
}

// What one entry of a launch's sequence list has to do.
struct Sequence {
  int begin = 0;         // first token
  int end = 0;           // one past the last token
  int64_t read = -1;     // slot of the initial state, -1: start from zero
  int64_t write = -1;    // slot of the final state, -1: discard it
  bool padding = false;  // y rows become 0 and no state is touched
};

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding.
__device__ __forceinline__ Sequence find_sequence(const ScanArgs& a, int64_t entry) {
  Sequence q;
  if (entry >= a.sequences) return q;
  const int64_t s = a.sequence_order ? a.sequence_order[entry] : entry;
  if (s < 0 || s >= a.sequences) return q;
  const int begin = a.cu_seqlens ? a.cu_seqlens[s] : 0;
  const int end = a.cu_seqlens ? a.cu_seqlens[s + 1] : a.tokens;
  const int64_t read = a.read_slots ? a.read_slots[s] : s;
  const int64_t write = a.write_slots ? a.write_slots[s] : read;
  const bool resume = a.state && (a.resume ? a.resume[s] != 0 : true);
  q.begin = max(begin, 0);
  q.end = min(end, a.tokens);
  q.padding =
      read == a.pad_slot || (resume && (read < 0 || read >= a.slots)) || (a.state && (write < -1 || write >= a.slots));
  if (q.padding) return q;
  if (resume) q.read = read;
  if (a.state) q.write = write;
  // An empty sequence that would write back what it read leaves the slot alone.
  if (q.end <= q.begin && q.read == q.write) q.read = q.write = -1;
  return q;
}

// Tokens from here on belong to no sequence: their rows of y become 0.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  if (!a.cu_seqlens) return a.tokens;
  return min(max(a.cu_seqlens[a.sequences], 0), a.tokens);
}

// Entries of a launch's list: one a sequence; with none, one entry's blocks still clear the unused rows of y.
__device__ __forceinline__ int64_t entries_of(const ScanArgs& a) { return max(a.sequences, 1); }

// Sums over the columns of a row: first the quads of a lane, then the lanes that share the row, each as a tree from the
// highest bit of the index down. Where quads are dealt out to lanes in turn, the order of the columns is then the same
// whatever the number of lanes.
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Sum of per-quad products in the fixed order: halves of the next power of two, from the highest bit down.
template <int kCount>
__device__ __forceinline__ float sum_quads(float (&v)[kCount]) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    constexpr int kHalf = kCount > 8 ? 8 : kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    static_assert(kCount <= 2 * kHalf, "a lane owns at most 16 quads");
    float folded[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) folded[i] = i + kHalf < kCount ? v[i] + v[i + kHalf] : v[i];
    return sum_quads(folded);
  }
}

// `lanes` neighbouring lanes, a power of two, get the sum of theirs.
__device__ __forceinline__ float sum_lanes(float v, int lanes) {
#pragma unroll
  for (int bit = lanes / 2; bit >= 1; bit /= 2) v = v + __shfl_xor_sync(kWholeWarp, v, bit);
  return v;
}

// Which (sequence entry, head, run of rows) a block works on.
struct Work {
  int64_t entry;
  int head;
  int row0;
};

__device__ __forceinline__ int64_t work_items(const ScanArgs& a, int rows) {
  return entries_of(a) * a.heads * ((a.head_dim + rows - 1) / rows);
}

__device__ __forceinline__ Work find_work(const ScanArgs& a, int64_t item, int rows) {
  const uint32_t runs = (a.head_dim + rows - 1) / rows;
  Work w;
  if (item <= 0xffffffffll) {  // 64-bit division is many times slower
    const uint32_t row_of_heads = static_cast<uint32_t>(item) / runs;
    w.row0 = static_cast<int>(static_cast<uint32_t>(item) - row_of_heads * runs) * rows;
    w.entry = row_of_heads / static_cast<uint32_t>(a.heads);
    w.head = static_cast<int>(row_of_heads - static_cast<uint32_t>(w.entry) * a.heads);
  } else {
    const int64_t row_of_heads = item / runs;
    w.row0 = static_cast<int>(item - row_of_heads * runs) * rows;
    w.entry = row_of_heads / a.heads;
    w.head = static_cast<int>(row_of_heads - w.entry * a.heads);
  }
  return w;
}

// Zeros in y: the rows of a padding sequence, and this entry's share of the tokens that belong to no sequence.
__device__ __forceinline__ void clear_rows(const ScanArgs& a, const Work& w, int rows, int64_t begin, int64_t end,
                                           int64_t step) {
  Io* y = static_cast<Io*>(a.y) + static_cast<int64_t>(w.head) * a.head_dim + w.row0;
  const int valid = min(rows, a.head_dim - w.row0);
  for (int64_t t = begin; t < end; t += step) {
    for (int r = threadIdx.x; r < valid; r += blockDim.x) y[t * a.y_stride + r] = from_f32<Io>(0.f);
  }
}

// One token's step of four columns: S = decay * S + dx * B, and the sum of S * C over them.
__device__ __forceinline__ float advance(float* s, float4 decay, float dx, float4 b, float4 c) {
  s[0] = fmaf(decay.x, s[0], dx * b.x);
  s[1] = fmaf(decay.y, s[1], dx * b.y);
  s[2] = fmaf(decay.z, s[2], dx * b.z);
  s[3] = fmaf(decay.w, s[3], dx * b.w);
  return fmaf(s[3], c.w, fmaf(s[2], c.z, fmaf(s[1], c.y, s[0] * c.x)));
}

// Where the kSlice columns of a lane are, and where staged columns stand in shared memory.
struct Layout {
  int d_state, lanes, slice;
  __device__ int column(int lane, int i) const { return lane * slice + i; }
  // Columns in shared memory of one token's B or C.
  __device__ int token_columns() const { return (lanes * slice + 31) / 32 * 32; }
  // NOTE: quads of columns 8 apart share banks; XOR with the quad's block of 8 sends them to different ones.
  __device__ int staged(int n) const { return 4 * (n / 4 ^ (n / 32 & 7)) + n % 4; }
  __device__ int tile_columns() const { return token_columns(); }
  // NOTE: the eight threads that read 16 bytes together own the same quad of different slices, 32 columns apart where
  // slices are full.
  __device__ int tiled(int row, int n) const { return 4 * (n / 4 ^ ((row * lanes + n / 32) & 7)) + n % 4; }
};

__device__ __forceinline__ float4 load_quad(const float* shared, const Layout& l, int lane, int q) {
  return *reinterpret_cast<const float4*>(shared + l.staged(l.column(lane, 4 * q)));
}

// Four columns of one token's B or C, zero beyond d_state.
__device__ __forceinline__ float4 load_input(const Io* row, int n, int d_state, bool vector) {
  if (vector) return n < d_state ? load4(row + n) : make_float4(0.f, 0.f, 0.f, 0.f);
  float4 v;
  v.x = n + 0 < d_state ? to_f32(row[n + 0]) : 0.f;
  v.y = n + 1 < d_state ? to_f32(row[n + 1]) : 0.f;
  v.z = n + 2 < d_state ? to_f32(row[n + 2]) : 0.f;
  v.w = n + 3 < d_state ? to_f32(row[n + 3]) : 0.f;
  return v;
}

// A lane's columns straight to global memory.
__device__ __forceinline__ void store_lane(const Destination& to, const Layout& l, int lane,
                                           const float (&s)[kSlice], bool vector, const uint64_t* rounding_key) {
  const Rounding rounding = find_rounding(rounding_key);
#pragma unroll
  for (int i = 0; i < kSlice; i += 4) {
    if (i < l.slice) {
      store_columns(to, l.column(lane, i), make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]), l.d_state, vector,
                    rounding);
    }
  }
}

extern __shared__ __align__(16) float shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 2)
ssm_recurrent_n128_l4_r32_c28_swizzled_f32_sf32(const __grid_constant__ ScanArgs a) {
  constexpr int d_state = kDState, lanes = kLanes, rows = kRows, chunk = kChunk, slice = kSlice;
  const Layout layout{d_state, lanes, slice};
  const int quads = lanes * slice / 4;
  const int token_columns = layout.token_columns();
  float* staged_B = shared_memory;
  float* staged_C = staged_B + chunk * token_columns;
  float* staged_x = staged_C + chunk * token_columns;
  float* staged_dt = staged_x + chunk * rows;

  const int lane = threadIdx.x % lanes;
  const int row = threadIdx.x / lanes;
  const bool vector_state = a.flags & kFlagVectorState;
  float* tile = shared_memory;
  const int tile_columns = layout.tile_columns();
  const int tile_rows = rows;

  const int64_t items = work_items(a, rows);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Work w = find_work(a, item, rows);
    const Sequence q = find_sequence(a, w.entry);
    clear_rows(a, w, rows, first_unused_token(a) + w.entry, a.tokens, entries_of(a));
    if (q.padding) {
      clear_rows(a, w, rows, q.begin, q.end, 1);
      continue;
    }
    const int valid_rows = min(rows, a.head_dim - w.row0);
    const bool row_valid = row < valid_rows;
    const int64_t first_row = static_cast<int64_t>(w.head) * a.head_dim + w.row0;
    const int64_t group = w.head / (a.heads / a.groups);
    const Io* x = static_cast<const Io*>(a.x) + first_row;
    const Io* z = static_cast<const Io*>(a.z) + first_row;
    const Io* B = static_cast<const Io*>(a.B) + group * d_state;
    const Io* C = static_cast<const Io*>(a.C) + group * d_state;
    Io* y = static_cast<Io*>(a.y) + first_row;
    State* state = static_cast<State*>(a.state) + first_row * d_state;
    const float A = a.flags & kFlagPerColumnA ? 0.f : a.A[w.head];
    const float* column_A = a.A + static_cast<int64_t>(w.head) * d_state;
    const float bias = a.dt_bias ? a.dt_bias[w.head] : 0.f;
    const float D = a.D ? a.D[w.head] : 0.f;

    float s[kSlice];
#pragma unroll
    for (int i = 0; i < kSlice; ++i) s[i] = 0.f;

    if (q.read >= 0) {
      const State* slot = state + q.read * a.state_stride;
      for (int row0 = 0; row0 < valid_rows; row0 += tile_rows) {
        __syncthreads();  // nobody reads the buffer any more
        const int pass_rows = min(tile_rows, valid_rows - row0);
        for (int i = threadIdx.x; i < pass_rows * quads; i += blockDim.x) {
          const int r = i / quads, n = 4 * (i % quads);
          const float4 v =
              load_columns(slot + static_cast<int64_t>(row0 + r) * d_state, n, d_state, vector_state);
          *reinterpret_cast<float4*>(tile + r * tile_columns + layout.tiled(row0 + r, n)) = v;
        }
        __syncthreads();  // the tile is loaded
        if (row >= row0 && row < row0 + pass_rows) {
          const float* from = tile + (row - row0) * tile_columns;
#pragma unroll
          for (int i = 0; i < kSlice; i += 4) {
            if (i < slice) {
              const float4 v = *reinterpret_cast<const float4*>(from + layout.tiled(row, layout.column(lane, i)));
              s[i] = v.x, s[i + 1] = v.y, s[i + 2] = v.z, s[i + 3] = v.w;
            }
          }
        }
      }
    }

    for (int t0 = q.begin; t0 < q.end; t0 += chunk) {
      const int n_tokens = min(chunk, q.end - t0);
      __syncthreads();  // the buffer's last readers are done
      for (int i = threadIdx.x; i < n_tokens * quads; i += blockDim.x) {
        const int t = i / quads, n = 4 * (i % quads);
        const float4 b = load_input(B + (t0 + t) * a.B_stride, n, d_state, a.flags & kFlagVectorB);
        const float4 c = load_input(C + (t0 + t) * a.C_stride, n, d_state, a.flags & kFlagVectorC);
        *reinterpret_cast<float4*>(staged_B + t * token_columns + layout.staged(n)) = b;
        *reinterpret_cast<float4*>(staged_C + t * token_columns + layout.staged(n)) = c;
      }
      for (int i = threadIdx.x; i < n_tokens * rows; i += blockDim.x) {
        const int t = i / rows, r = i % rows;
        staged_x[i] = r < valid_rows ? to_f32(x[(t0 + t) * a.x_stride + r]) : 0.f;
      }
      for (int t = threadIdx.x; t < n_tokens; t += blockDim.x) {
        staged_dt[t] = load_dt(a, a.dt, (t0 + t) * a.dt_stride + w.head);
      }
      __syncthreads();  // the chunk is staged

      for (int t = 0; t < n_tokens; ++t) {
        const float d = step_size(staged_dt[t], bias, a.flags, a.dt_min, a.dt_max);
        const float x_t = staged_x[t * rows + row];
        const float dx = d * x_t;
        const float decay = expf(d * A);
        const float* token_B = staged_B + t * token_columns;
        const float* token_C = staged_C + t * token_columns;
        float sums[kSlice / 4];
        if (a.flags & kFlagPerColumnA) {
#pragma unroll
          for (int i = 0; i < kSlice / 4; ++i) {
            sums[i] = 0.f;
            if (4 * i < slice) {
              const float4 b = load_quad(token_B, layout, lane, i), c = load_quad(token_C, layout, lane, i);
              float4 e = make_float4(1.f, 1.f, 1.f, 1.f);
              const int n0 = layout.column(lane, 4 * i), n1 = layout.column(lane, 4 * i + 1);
              const int n2 = layout.column(lane, 4 * i + 2), n3 = layout.column(lane, 4 * i + 3);
              if (n0 < d_state) e.x = expf(d * column_A[n0]);
              if (n1 < d_state) e.y = expf(d * column_A[n1]);
              if (n2 < d_state) e.z = expf(d * column_A[n2]);
              if (n3 < d_state) e.w = expf(d * column_A[n3]);
              sums[i] = advance(s + 4 * i, e, dx, b, c);
            }
          }
        } else {
          const float4 e = make_float4(decay, decay, decay, decay);
#pragma unroll
          for (int i = 0; i < kSlice / 4; ++i) {
            sums[i] = 0.f;
            if (4 * i < slice) {
              const float4 b = load_quad(token_B, layout, lane, i), c = load_quad(token_C, layout, lane, i);
              sums[i] = advance(s + 4 * i, e, dx, b, c);
            }
          }
        }
        float out = sum_lanes(sum_quads(sums), lanes);
        if (lane == 0 && row_valid) {
          if (a.D) out = fmaf(D, x_t, out);
          if (a.z) out *= silu(to_f32(z[(t0 + t) * a.z_stride + row]));
          y[(t0 + t) * a.y_stride + row] = from_f32<Io>(out);
        }
        if (a.checkpoint_slots && row_valid) {
          const int64_t slot = a.checkpoint_slots[t0 + t];
          if (slot >= 0 && slot < a.slots) {
            store_lane({state + slot * a.state_stride + row * d_state, static_cast<uint32_t>(first_row + row), slot,
                        t0 + t - q.begin},
                       layout, lane, s, vector_state, a.rounding_key);
          }
        }
      }
    }

    if (q.write >= 0) {
      State* slot = state + q.write * a.state_stride;
      const int last = q.end - q.begin - 1;
      const Rounding rounding = find_rounding(a.rounding_key);
      for (int row0 = 0; row0 < valid_rows; row0 += tile_rows) {
        const int pass_rows = min(tile_rows, valid_rows - row0);
        __syncthreads();  // nobody reads the buffer any more
        if (row >= row0 && row < row0 + pass_rows) {
          float* to = tile + (row - row0) * tile_columns;
#pragma unroll
          for (int i = 0; i < kSlice; i += 4) {
            if (i < slice) {
              *reinterpret_cast<float4*>(to + layout.tiled(row, layout.column(lane, i))) =
                  make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
            }
          }
        }
        __syncthreads();  // the tile is filled
        for (int i = threadIdx.x; i < pass_rows * quads; i += blockDim.x) {
          const int r = row0 + i / quads, n = 4 * (i % quads);
          const float* from = tile + (r - row0) * tile_columns;
          const float4 v = *reinterpret_cast<const float4*>(from + layout.tiled(r, n));
          store_columns({slot + static_cast<int64_t>(r) * d_state, static_cast<uint32_t>(first_row + r), q.write, last},
                        n, v, d_state, vector_state, rounding);
        }
      }
    }
  }
}

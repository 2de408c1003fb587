// SPDX-License-Identifier: Apache-2.0
//
// ssm_recurrent_n256_l32_r32_w8_c16_tiled_f16_sf32
//
// The selective state-space scan of Mamba-2 (one A a head) and Mamba-1 (one A a column), token by token in the order
// of the recurrence. For token t of a sequence, head h, group g = h / (heads / groups), row p, column n:
//
//   d      = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//   y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * silu(z[t,h,p])
//
// Layout `tiled`: a lane owns a tile of 4 rows by 8 columns in registers, the columns as quads l, l + 32, ...
// The state moves in coalesced 16-byte accesses straight between registers and global memory, and every lane count sums
// y in the same order. B, C and x of the next chunk are copied asynchronously while this one is computed; softplus and
// decay are computed once a token, for many tokens at a time and not once a lane.
// What a state element costs beside its three FP32 instructions decides the shape of the tile. A quad of B or C is read
// once for all rows of a tile: more rows, fewer reads of shared memory, which one row a lane saturates. A sum of y over
// the lanes costs four instructions; the sums of 8 tokens and 4 rows cross the lanes together and halve at each
// step. And a multiprocessor needs two warps a scheduler at least, which bounds the elements of a lane. The candidates'
// times are in docs/recurrent.md.
//
// Launch: one block a (sequence, head, run of rows), runs of rows fastest:
//   grid.x = max(sequences, 1) * heads * ceil(head_dim / rows), at most 2^31 - 1 (blocks stride beyond that);
//   block.x = 256; dynamic shared memory = 71680 bytes; rows = 32.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused where fmaf says so and nowhere else, so that the order of rounding is what this file says.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = __half;    // x, z, y, B, C
using State = float;  // the stored state; arithmetic is f32

constexpr int kDState = 256;  // columns of a row
constexpr int kLanes = 32;    // lanes that share a row
constexpr int kRows = 32;     // rows of a block
constexpr int kChunk = 16;    // tokens staged at a time
constexpr int kSlice = 8;     // columns a lane owns of a row
constexpr int kThreads = 256;
constexpr int kRowTile = 4;  // rows a lane owns
constexpr int kBatch = 8;    // tokens whose sums are reduced together

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

// Begins kValues sums over kLanes lanes at once: at each step a lane keeps half of its values and sends its partner the
// other half, so that a sum costs about one shuffle. Each lane is left with v[0], its share of the sum of index
// folded_index<kLanes, kValues>(lane), which kLanes / kValues neighbouring lanes have yet to add up.
template <int kLanes, int kValues, int kSize>
__device__ __forceinline__ void fold_lanes(float (&v)[kSize], int lane) {
  if constexpr (kValues > 1) {
    constexpr int kHalf = kValues / 2, kBit = kLanes / 2;
    const bool upper = lane & kBit;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = upper ? v[i] : v[i + kHalf];
      const float keep = upper ? v[i + kHalf] : v[i];
      v[i] = keep + __shfl_xor_sync(kWholeWarp, send, kBit);
    }
    fold_lanes<kBit, kHalf>(v, lane);
  }
}

template <int kLanes, int kValues>
__device__ __forceinline__ int folded_index(int lane) {
  return lane % kLanes / (kLanes / kValues);
}

// Sixteen bytes from global to shared memory without passing through registers (sm_80 and up).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if defined(SSM_EMULATOR)
  emu_cp_async(shared, global, 16);
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global)
      : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// Waits for this thread's own copies; a barrier must follow before other threads read them.
__device__ __forceinline__ void copy_async_wait_all() {
#if defined(SSM_EMULATOR)
  emu_cp_async_commit();
  emu_cp_async_wait_group(0);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
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

constexpr int kQuads = kSlice / 4;           // quads of columns a lane owns of a row
constexpr int kColumns = kSlice * kLanes;    // columns in shared memory: kDState and zeros up to the last quad
constexpr int kPerAccess = 16 / sizeof(Io);  // elements of a 16-byte access
constexpr bool kWiden = sizeof(Io) < 4;      // 16-bit B and C are widened once a chunk
constexpr int kStagedRows = (kRows + kPerAccess - 1) / kPerAccess * kPerAccess;

// Tokens whose steps are computed at once, a thread each: several chunks, so that the long chain of softplus and
// exponential is waited for once in a while and not once a chunk.
constexpr int kStepTokens = kThreads / kChunk * kChunk;

// Shared memory, in order: two buffers of raw tokens, two of steps, and widened B and C of one chunk.
struct Staged {
  Io B[kChunk][kColumns];
  Io C[kChunk][kColumns];
  Io x[kChunk][kStagedRows];
};
struct Step {
  float decay, d;
};
struct Widened {
  float B[kChunk][kColumns];
  float C[kChunk][kColumns];
};
constexpr int kStepsAt = 2 * sizeof(Staged);
constexpr int kWidenedAt = kStepsAt + 2 * kStepTokens * sizeof(Step);
static_assert(kWidenedAt + (kWiden ? sizeof(Widened) : 0) == 71680,
              "the launch asks for what the kernel uses");

extern __shared__ __align__(16) unsigned char shared_memory[];

// The copies that this thread makes of rows of kCount elements, [tokens][kCount], a chunk at a time: neighbouring
// threads copy neighbouring pieces of a row. What is no multiple of 16 bytes goes through registers.
template <int kCount>
struct Copier {
  static constexpr int kPieces = kCount / kPerAccess;
  static constexpr int kSpan = kPieces >= 32 ? 32 : kPieces >= 16 ? 16 : kPieces >= 8 ? 8 : kPieces >= 4 ? 4 : 1;
  static constexpr int kStep = kThreads / kSpan;  // tokens apart
  const Io* from;
  int64_t stride;
  int valid;  // elements of a row from here on become 0
  bool vector;

  __device__ Copier(const Io* rows, int64_t stride, int begin, int valid, bool vector)
      : from(rows + (begin + static_cast<int64_t>(threadIdx.x / kSpan)) * stride),
        stride(stride),
        valid(valid),
        vector(vector) {}

  // Starts the copies of the next n_tokens rows and moves on by a chunk.
  __device__ __forceinline__ void stage(Io (*to)[kCount], int n_tokens) {
    const Io* row = from;
    from += kChunk * stride;
    int t = threadIdx.x / kSpan;
    if (vector) {
      const int first = threadIdx.x % kSpan * kPerAccess;
#pragma unroll
      for (int i = 0; i < kChunk; i += kStep, t += kStep, row += kStep * stride) {
        if (t < n_tokens) {
#pragma unroll
          for (int n = first; n < kPieces * kPerAccess; n += kSpan * kPerAccess) {
            if (n < valid) {
              copy_async_16(&to[t][n], row + n);
            } else {
              *reinterpret_cast<uint4*>(&to[t][n]) = make_uint4(0u, 0u, 0u, 0u);
            }
          }
        }
      }
    } else {
#pragma unroll 1
      for (; t < n_tokens; t += kStep, row += kStep * stride) {
#pragma unroll 1
        for (int n = threadIdx.x % kSpan; n < kCount; n += kSpan) to[t][n] = n < valid ? row[n] : from_f32<Io>(0.f);
      }
    }
  }
};

// A lane's tile of the state: kRowTile rows of kQuads quads.
struct Tile {
  float s[kRowTile][kSlice];
};

// NOTE: `vector` is a constant at each call, so that the accesses of a tile follow each other without a branch.
__device__ __forceinline__ void load_tile(Tile& tile, const State* rows, int valid_rows, bool vector, int lane) {
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      if (r < valid_rows) v = load_columns(rows + r * kDState, 4 * (lane + kLanes * i), kDState, vector);
      tile.s[r][4 * i] = v.x, tile.s[r][4 * i + 1] = v.y, tile.s[r][4 * i + 2] = v.z, tile.s[r][4 * i + 3] = v.w;
    }
  }
}

__device__ __forceinline__ void store_rows(const Tile& tile, Destination to, int valid_rows, bool vector,
                                           const Rounding& rounding, int lane) {
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    if (r < valid_rows) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float* s = tile.s[r] + 4 * i;
        store_columns(to, 4 * (lane + kLanes * i), make_float4(s[0], s[1], s[2], s[3]), kDState, vector, rounding);
      }
    }
    to.row += kDState;
    to.row_index += 1;
  }
}

__device__ __forceinline__ void store_tile(const ScanArgs& a, const Tile& tile, const Destination& to, int valid_rows,
                                           int lane) {
  const Rounding rounding = find_rounding(a.rounding_key);
  if (a.flags & kFlagVectorState) {
    store_rows(tile, to, valid_rows, true, rounding, lane);
  } else {
    store_rows(tile, to, valid_rows, false, rounding, lane);
  }
}

// What a lane reads of the staged tokens, from one token on.
struct View {
  const float* b;  // its first quad of B; C follows B
  const Io* x;     // its first row
  const Step* step;
  __device__ __forceinline__ void skip(int tokens) {
    b += tokens * kColumns;
    x += tokens * kStagedRows;
    step += tokens;
  }
};

// One token's step of a lane's tile; sums[r] becomes the lane's share of y of its row r.
template <bool kPerColumn>
__device__ __forceinline__ void advance_tile(Tile& tile, const View& view, int u, const float* column_A, int lane,
                                             float* sums) {
  const Step step = view.step[u];
  float dx[kRowTile];
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) dx[r] = step.d * to_f32(view.x[u * kStagedRows + r]);
  float quads[kRowTile][kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float* b_at = view.b + u * kColumns + 4 * kLanes * i;
    const float4 b = *reinterpret_cast<const float4*>(b_at);
    const float4 c = *reinterpret_cast<const float4*>(b_at + kChunk * kColumns);
    float4 decay = make_float4(step.decay, step.decay, step.decay, step.decay);
    if constexpr (kPerColumn) {
      const int n = 4 * (lane + kLanes * i);
      decay.x = n + 0 < kDState ? expf(step.d * column_A[n + 0]) : 1.f;
      decay.y = n + 1 < kDState ? expf(step.d * column_A[n + 1]) : 1.f;
      decay.z = n + 2 < kDState ? expf(step.d * column_A[n + 2]) : 1.f;
      decay.w = n + 3 < kDState ? expf(step.d * column_A[n + 3]) : 1.f;
    }
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) quads[r][i] = advance(tile.s[r] + 4 * i, decay, dx[r], b, c);
  }
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) sums[r] = sum_quads(quads[r]);
}

// Where y of the next tokens goes. The pointers stand at the next token and move on with it.
struct Output {
  Io* y;
  const Io* z;
  int64_t y_stride, z_stride;
  bool has_D, has_z;
  float D;
};

// The one y of kTokens * kRowTile that a lane is left with when their sums have crossed the lanes: rows are dealt out
// by the high bits of the lane, tokens by the next.
template <int kTokens>
struct Share {
  static_assert(kTokens * kRowTile <= kLanes, "a lane is left with one sum");
  bool writes;
  int x_offset;  // from the lane's first row, in staged x
  int64_t y_offset, z_offset;
  __device__ Share(const Output& to, int lane, int row, int valid_rows) {
    const int r = folded_index<kLanes, kRowTile>(lane), u = folded_index<kLanes / kRowTile, kTokens>(lane);
    writes = lane % (kLanes / kRowTile / kTokens) == 0 && row + r < valid_rows;
    x_offset = u * kStagedRows + r;
    y_offset = u * to.y_stride + row + r;
    z_offset = u * to.z_stride + row + r;
  }
};

// kTokens steps of the recurrence and their y. A token's sums are folded over rows as soon as they are there, so that
// shuffles mix with the next token's arithmetic, and over tokens at the end.
template <int kTokens, bool kPerColumn>
__device__ __forceinline__ void advance_tokens(Tile& tile, View& view, const float* column_A, Output& to,
                                               const Share<kTokens>& share, int lane) {
  float sums[kTokens];
#pragma unroll
  for (int u = 0; u < kTokens; ++u) {
    float row_sums[kRowTile];
    advance_tile<kPerColumn>(tile, view, u, column_A, lane, row_sums);
    fold_lanes<kLanes, kRowTile>(row_sums, lane);
    sums[u] = row_sums[0];
  }
  const float x = to_f32(view.x[share.x_offset]);
  fold_lanes<kLanes / kRowTile, kTokens>(sums, lane);
  float out = sum_lanes(sums[0], kLanes / kRowTile / kTokens);
  if (share.writes) {
    if (to.has_D) out = fmaf(to.D, x, out);
    if (to.has_z) out *= silu(to_f32(to.z[share.z_offset]));
    to.y[share.y_offset] = from_f32<Io>(out);
  }
  to.y += kTokens * to.y_stride;
  to.z += kTokens * to.z_stride;
  view.skip(kTokens);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
ssm_recurrent_n256_l32_r32_w8_c16_tiled_f16_sf32(const __grid_constant__ ScanArgs a) {
  Staged* staged = reinterpret_cast<Staged*>(shared_memory);
  Step* steps = reinterpret_cast<Step*>(shared_memory + kStepsAt);
  Widened& widened = *reinterpret_cast<Widened*>(shared_memory + kWidenedAt);

  const int thread = threadIdx.x;
  const int lane = thread % kLanes;
  const int row = thread / kLanes * kRowTile;
  const bool per_column = a.flags & kFlagPerColumnA;

  const int64_t items = work_items(a, kRows);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Work w = find_work(a, item, kRows);
    const Sequence q = find_sequence(a, w.entry);
    const int unused = first_unused_token(a);  // needed last, but a load here waits with the others
    if (q.padding) {
      clear_rows(a, w, kRows, q.begin, q.end, 1);
      clear_rows(a, w, kRows, unused + w.entry, a.tokens, entries_of(a));
      continue;
    }
    const int64_t first_row = static_cast<int64_t>(w.head) * a.head_dim + w.row0;
    const int valid_rows = min(kRows, a.head_dim - w.row0);
    const uint32_t row_index = static_cast<uint32_t>(first_row + row);
    const int64_t group = w.head / (a.heads / a.groups);
    Copier<kStagedRows> copy_x(static_cast<const Io*>(a.x) + first_row, a.x_stride, q.begin, valid_rows,
                               kRows % kPerAccess == 0 && (a.flags & kFlagVectorX));
    Copier<kColumns> copy_B(static_cast<const Io*>(a.B) + group * kDState, a.B_stride, q.begin, kDState,
                            kDState % kPerAccess == 0 && (a.flags & kFlagVectorB));
    Copier<kColumns> copy_C(static_cast<const Io*>(a.C) + group * kDState, a.C_stride, q.begin, kDState,
                            kDState % kPerAccess == 0 && (a.flags & kFlagVectorC));
    const auto stage_chunk = [&](Staged& to, int n_tokens) {
      copy_B.stage(to.B, n_tokens);
      copy_C.stage(to.C, n_tokens);
      copy_x.stage(to.x, n_tokens);
    };
    // This thread's token among the kStepTokens from t0 on.
    const auto load_step = [&](int t0) {
      const bool mine = thread < kStepTokens && thread < q.end - t0;
      return mine ? load_dt(a, a.dt, (t0 + static_cast<int64_t>(thread)) * a.dt_stride + w.head) : 0.f;
    };

    __syncthreads();  // the last item's readers are done
    stage_chunk(staged[0], min(kChunk, q.end - q.begin));
    float dt = load_step(q.begin);
    // The inputs' few loads went first, so that softplus and decay are done while the state, the longest wait, comes.
    State* state = static_cast<State*>(a.state) + (first_row + row) * kDState;
    Tile tile;
    if (q.read < 0) {
      load_tile(tile, state, 0, true, lane);
    } else if (a.flags & kFlagVectorState) {
      load_tile(tile, state + q.read * a.state_stride, valid_rows - row, true, lane);
    } else {
      load_tile(tile, state + q.read * a.state_stride, valid_rows - row, false, lane);
    }
    const float A = per_column ? 0.f : a.A[w.head];
    const float* column_A = a.A + static_cast<int64_t>(w.head) * kDState;
    const float bias = a.dt_bias ? a.dt_bias[w.head] : 0.f;
    Output to{static_cast<Io*>(a.y) + q.begin * a.y_stride + first_row,
              static_cast<const Io*>(a.z) + q.begin * a.z_stride + first_row,
              a.y_stride,
              a.z_stride,
              a.D != nullptr,
              a.z != nullptr,
              a.D ? a.D[w.head] : 0.f};
    const Share<kBatch> batch_share(to, lane, row, valid_rows);
    const Share<1> share(to, lane, row, valid_rows);

    int buffer = 0, step = 0;
    for (int t0 = q.begin; t0 < q.end; t0 += kChunk, buffer ^= 1) {
      const int n_tokens = min(kChunk, q.end - t0);
      if (step % kStepTokens == 0) {
        step %= 2 * kStepTokens;
        if (thread < kStepTokens) {
          const float d = step_size(dt, bias, a.flags, a.dt_min, a.dt_max);
          steps[step + thread] = {expf(d * A), d};
        }
        dt = load_step(t0 + kStepTokens);
      }
      copy_async_wait_all();
      __syncthreads();  // the chunk and its steps are staged, and nobody reads the other buffer
      for (int i = thread; i < n_tokens * (kColumns / 4); i += kThreads) {
        const int t = i / (kColumns / 4), n = i % (kColumns / 4) * 4;
        *reinterpret_cast<float4*>(&widened.B[t][n]) = load4(&staged[buffer].B[t][n]);
        *reinterpret_cast<float4*>(&widened.C[t][n]) = load4(&staged[buffer].C[t][n]);
      }
      const float* B = &widened.B[0][0];
      View view{B + 4 * lane, &staged[buffer].x[0][row], steps + step};
      step += kChunk;
      if (t0 + kChunk < q.end) stage_chunk(staged[buffer ^ 1], min(kChunk, q.end - t0 - kChunk));
      __syncthreads();  // B and C are widened

      int t = 0;
      if (!per_column && !a.checkpoint_slots) {
        for (; t + kBatch <= n_tokens; t += kBatch) {
          advance_tokens<kBatch, false>(tile, view, column_A, to, batch_share, lane);
        }
      }
      for (; t < n_tokens; ++t) {
        if (per_column) {
          advance_tokens<1, true>(tile, view, column_A, to, share, lane);
        } else {
          advance_tokens<1, false>(tile, view, column_A, to, share, lane);
        }
        const int64_t slot = a.checkpoint_slots ? a.checkpoint_slots[t0 + t] : -1;
        if (slot >= 0 && slot < a.slots) {
          store_tile(a, tile, {state + slot * a.state_stride, row_index, slot, t0 + t - q.begin}, valid_rows - row,
                     lane);
        }
      }
    }
    if (q.write >= 0) {
      store_tile(a, tile, {state + q.write * a.state_stride, row_index, q.write, q.end - q.begin - 1}, valid_rows - row,
                 lane);
    }
    clear_rows(a, w, kRows, unused + w.entry, a.tokens, entries_of(a));
  }
}

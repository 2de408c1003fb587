// SPDX-License-Identifier: Apache-2.0
//
// ssm_recurrent_n128_l8_r32_w4_c16_tiled_f32_sf32
//
// The selective state-space scan of Mamba-2 (one A a head) and Mamba-1 (one A a column), token by token in the order
// of the recurrence. For token t of a sequence, head h, group g = h / (heads / groups), row p, column n:
//
//   d      = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//   y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * silu(z[t,h,p])
//
// Layout `tiled`: a lane owns a tile of 2 rows by 16 columns in registers, the columns as quads l, l + 8, ...:
// four columns of B and C read from shared memory serve 2 rows, the state moves in coalesced 16-byte accesses
// straight to and from registers, and every lane count sums y in the same order. B, C and x of the next chunk are
// copied asynchronously while this chunk is computed; softplus and decay are computed once a token and block, not
// once a lane; the sums of 4 tokens cross the lanes together, halving at each step, so that a sum costs one shuffle.
//
// Launch: one block a (sequence, head, run of rows), runs of rows fastest:
//   grid.x = max(sequences, 1) * heads * ceil(head_dim / rows), at most 2^31 - 1 (blocks stride beyond that);
//   block.x = 128; dynamic shared memory = 39552 bytes; rows = 32.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused only where fmaf says so, so that a kernel gives the same bits on every target.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = float;        // x, z, y, B, C
using State = float;  // the stored state; arithmetic is f32

constexpr int kDState = 128;  // columns of a row
constexpr int kLanes = 8;     // lanes that share a row
constexpr int kRows = 32;       // rows of a block
constexpr int kChunk = 16;     // tokens staged at a time
constexpr int kSlice = 16;     // columns a lane owns of a row
constexpr int kThreads = 128;
constexpr int kRowTile = 2;  // rows a lane owns
constexpr int kBatch = 4;       // tokens whose sums are reduced together

// The one argument of every entry. The order is frozen: NumPy (pyharness/args.py), Go and C mirror it.
// Pointers are device addresses, null where an optional array is absent. Strides are in elements.
struct ScanArgs {
  const void* x;  // [tokens, heads, head_dim], io
  const void* z;  // like x, optional gate
  void* y;        // like x, output
  const void* dt;  // [tokens, heads], io or f32
  const float* A;  // [heads], or [heads, d_state] with kFlagPerColumnA
  const void* B;   // [tokens, groups, d_state], io
  const void* C;   // like B
  const float* D;        // [heads], optional
  const float* dt_bias;  // [heads], optional
  void* state;           // [slots, heads, head_dim, d_state]
  float* state_scale;    // [slots, heads, head_dim], 8-bit state only
  const int32_t* cu_seqlens;        // [sequences + 1], null: one sequence
  const int32_t* read_slots;        // [sequences], null: 0, 1, 2, ...
  const int32_t* write_slots;       // [sequences], null: read_slots
  const uint8_t* resume;            // [sequences], null: 1 where there is a state
  const int32_t* checkpoint_slots;  // [tokens], optional
  const int32_t* sequence_order;    // the sequences a launch visits, optional
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
  return a.flags & kFlagDtF32 ? static_cast<const float*>(dt_io)[index]
                              : to_f32(static_cast<const Io*>(dt_io)[index]);
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
__device__ __forceinline__ float load_column(const State* row, int n) { return to_f32(row[n]); }

__device__ __forceinline__ float4 load_columns(const State* row, int n, int d_state, bool vector) {
  if (vector) return n < d_state ? widen4(load_streaming(reinterpret_cast<const Quad<State>::type*>(row + n)), State())
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

__device__ __forceinline__ void store_column(const Destination& to, int n, float v, int d_state, const Rounding& r) {
  uint32_t random = 0;
  if (r.stochastic) {
    const uint4 words = draw4(r, to.row_index, (d_state + 3) / 4, n / 4, to.slot, to.token);
    random = n % 4 == 0 ? words.x : n % 4 == 1 ? words.y : n % 4 == 2 ? words.z : words.w;
  }
  to.row[n] = round_to(v, random, r.stochastic, State());
}

__device__ __forceinline__ void store_columns(const Destination& to, int n, float4 v, int d_state, bool vector,
                                              const Rounding& r) {
  if (n >= d_state) return;
  uint4 random = make_uint4(0u, 0u, 0u, 0u);
  if (r.stochastic) random = draw4(r, to.row_index, (d_state + 3) / 4, n / 4, to.slot, to.token);
  alignas(16) State out[4] = {round_to(v.x, random.x, r.stochastic, State()),
                              round_to(v.y, random.y, r.stochastic, State()),
                              round_to(v.z, random.z, r.stochastic, State()),
                              round_to(v.w, random.w, r.stochastic, State())};
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
  int begin = 0;        // first token
  int end = 0;          // one past the last token
  int64_t read = -1;    // slot of the initial state, -1: start from zero
  int64_t write = -1;   // slot of the final state, -1: discard it
  bool padding = false;  // y rows become 0 and no state is touched
};

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding.
__device__ __forceinline__ Sequence find_sequence(const ScanArgs& a, int64_t entry) {
  Sequence q;
  const int64_t s = a.sequence_order ? a.sequence_order[entry] : entry;
  if (s < 0 || s >= a.sequences) return q;
  const int begin = a.cu_seqlens ? a.cu_seqlens[s] : 0;
  const int end = a.cu_seqlens ? a.cu_seqlens[s + 1] : a.tokens;
  const int64_t read = a.read_slots ? a.read_slots[s] : s;
  const int64_t write = a.write_slots ? a.write_slots[s] : read;
  const bool resume = a.state && (a.resume ? a.resume[s] != 0 : true);
  q.begin = max(begin, 0);
  q.end = min(end, a.tokens);
  q.padding = read == a.pad_slot || (resume && (read < 0 || read >= a.slots)) ||
              (a.state && (write < -1 || write >= a.slots));
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

// Sequences that a launch visits; with none, one entry's blocks still clear the unused rows of y.
__device__ __forceinline__ int64_t entries_of(const ScanArgs& a) { return max(a.sequences, 1); }

// Sums over the lanes that share a row: column bits from high to low, whatever the number of lanes.
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

// kValues sums over kLanes lanes at once: each step sends the half that the partner keeps, so that kValues sums take
// kValues - 1 shuffles while kValues <= kLanes. Lane l is left with v[0 .. max(1, kValues / kLanes)), the sums from
// index `first_sum<kLanes, kValues>(l)` on. kValues is a power of two.
template <int kLanes, int kValues>
__device__ __forceinline__ void sum_lanes_scattered(float (&v)[kValues], int lane) {
  int count = kValues;
#pragma unroll
  for (int bit = kLanes / 2; bit >= 1; bit /= 2) {
    const bool upper = lane & bit;
    if (count > 1) {
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float send = upper ? v[i] : v[i + count];
        const float keep = upper ? v[i + count] : v[i];
        v[i] = keep + __shfl_xor_sync(kWholeWarp, send, bit);
      }
    } else {
      v[0] = v[0] + __shfl_xor_sync(kWholeWarp, v[0], bit);
    }
  }
}

template <int kLanes, int kValues>
__device__ __forceinline__ int first_sum(int lane) {
  int first = 0, count = kValues;
#pragma unroll
  for (int bit = kLanes / 2; bit >= 1 && count > 1; bit /= 2) {
    count /= 2;
    if (lane & bit) first += count;
  }
  return first;
}

// Sixteen bytes from global to shared memory without passing through registers (sm_80 and up).
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#if defined(SSM_EMULATOR)
  emu_cp_async(shared, global, 16);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
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
constexpr int kSumStride = kRows + 8;        // floats between tokens of the sums: the lanes of a row meet other banks
constexpr int kPerAccess = 16 / sizeof(Io);  // elements of a 16-byte access
constexpr bool kWiden = sizeof(Io) < 4;      // 16-bit B and C are widened once a chunk
constexpr int kStagedRows = (kRows + kPerAccess - 1) / kPerAccess * kPerAccess;

// Shared memory, in order: two buffers of raw tokens, widened B and C of one chunk, sums, and steps.
struct Staged {
  Io B[kChunk][kColumns];
  Io C[kChunk][kColumns];
  Io x[kChunk][kStagedRows];
};
struct Widened {
  float B[kChunk][kColumns];
  float C[kChunk][kColumns];
};
struct Step {
  float decay, d;
};
constexpr int kWidenedBytes = kWiden ? sizeof(Widened) : 0;
constexpr int kSumsBytes = kChunk * kSumStride * sizeof(float);
static_assert(2 * sizeof(Staged) + kWidenedBytes + kSumsBytes + kChunk * sizeof(Step) == 39552,
              "the launch asks for what the kernel uses");

extern __shared__ __align__(16) unsigned char shared_memory[];

// Starts the copies of n_tokens rows of kCount elements; those from `valid` on become 0. Neighbouring threads copy
// neighbouring pieces of a row. What is no multiple of 16 bytes goes through registers.
template <int kCount>
__device__ __forceinline__ void stage(Io (*to)[kCount], const Io* from, int64_t stride, int n_tokens, int valid,
                                      bool vector) {
  constexpr int kPiece = kCount % kPerAccess == 0 ? kPerAccess : 1;
  constexpr int kPieces = kCount / kPiece;
  constexpr int kSpan = kPieces >= 32 ? 32 : kPieces >= 16 ? 16 : kPieces >= 8 ? 8 : kPieces >= 4 ? 4 : 1;
  const int first = threadIdx.x % kSpan, t_first = threadIdx.x / kSpan;
  from += t_first * stride;
  for (int t = t_first; t < n_tokens; t += kThreads / kSpan, from += kThreads / kSpan * stride) {
    if (vector) {
#pragma unroll
      for (int n = first * kPiece; n < kCount; n += kSpan * kPiece) {
        if (n < valid) {
          copy_async_16(&to[t][n], from + n);
        } else {
          *reinterpret_cast<uint4*>(&to[t][n]) = make_uint4(0u, 0u, 0u, 0u);
        }
      }
    } else {
      for (int n = first; n < kCount; n += kSpan) to[t][n] = n < valid ? from[n] : from_f32<Io>(0.f);
    }
  }
}

// A lane's tile of the state: kRowTile rows of kQuads quads.
struct Tile {
  float s[kRowTile][kSlice];
};

__device__ __forceinline__ void store_tile(const ScanArgs& a, const Tile& tile, State* state, int64_t slot, int token,
                                           int64_t first_row, int valid_rows, int lane, int row) {
  const Rounding rounding = find_rounding(a.rounding_key);
  const bool vector = a.flags & kFlagVectorState;
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    if (row + r < valid_rows) {
      const Destination to{state + slot * a.state_stride + (row + r) * kDState,
                           static_cast<uint32_t>(first_row + row + r), slot, token};
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float* s = tile.s[r] + 4 * i;
        store_columns(to, 4 * (lane + kLanes * i), make_float4(s[0], s[1], s[2], s[3]), kDState, vector, rounding);
      }
    }
  }
}

// kTokens steps of the recurrence, and their sums into shared memory.
template <int kTokens, bool kPerColumn>
__device__ __forceinline__ void advance_tokens(Tile& tile, const float (*B)[kColumns], const float (*C)[kColumns],
                                               const Io (*x)[kStagedRows], const Step* steps, const float* column_A,
                                               float* sums, int lane, int row) {
  float out[kTokens * kRowTile];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const Step step = steps[t];
    float dx[kRowTile];
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) dx[r] = step.d * to_f32(x[t][row + r]);
    float quads[kRowTile][kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int n = 4 * (lane + kLanes * i);
      const float4 b = *reinterpret_cast<const float4*>(&B[t][n]);
      const float4 c = *reinterpret_cast<const float4*>(&C[t][n]);
      float4 decay = make_float4(step.decay, step.decay, step.decay, step.decay);
      if (kPerColumn) {
        decay.x = n + 0 < kDState ? expf(step.d * column_A[n + 0]) : 1.f;
        decay.y = n + 1 < kDState ? expf(step.d * column_A[n + 1]) : 1.f;
        decay.z = n + 2 < kDState ? expf(step.d * column_A[n + 2]) : 1.f;
        decay.w = n + 3 < kDState ? expf(step.d * column_A[n + 3]) : 1.f;
      }
#pragma unroll
      for (int r = 0; r < kRowTile; ++r) quads[r][i] = advance(tile.s[r] + 4 * i, decay, dx[r], b, c);
    }
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) out[t * kRowTile + r] = sum_quads(quads[r]);
  }
  sum_lanes_scattered<kLanes>(out, lane);
  constexpr int kHeld = kTokens * kRowTile > kLanes ? kTokens * kRowTile / kLanes : 1;
  constexpr int kCopies = kTokens * kRowTile < kLanes ? kLanes / (kTokens * kRowTile) : 1;
  const int first = first_sum<kLanes, kTokens * kRowTile>(lane);
  if (lane % kCopies == 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      sums[(first + i) / kRowTile * kSumStride + row + (first + i) % kRowTile] = out[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) ssm_recurrent_n128_l8_r32_w4_c16_tiled_f32_sf32(const __grid_constant__ ScanArgs a) {
  Staged* staged = reinterpret_cast<Staged*>(shared_memory);
  Widened& widened = *reinterpret_cast<Widened*>(shared_memory + 2 * sizeof(Staged));
  float* sums = reinterpret_cast<float*>(shared_memory + 2 * sizeof(Staged) + kWidenedBytes);
  Step* steps = reinterpret_cast<Step*>(shared_memory + 2 * sizeof(Staged) + kWidenedBytes + kSumsBytes);

  const int lane = threadIdx.x % kLanes;
  const int row = threadIdx.x / kLanes * kRowTile;
  const bool vector_state = a.flags & kFlagVectorState;
  const bool per_column = a.flags & kFlagPerColumnA;

  const int64_t items = work_items(a, kRows);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Work w = find_work(a, item, kRows);
    const Sequence q = find_sequence(a, w.entry);
    if (q.padding) {
      clear_rows(a, w, kRows, q.begin, q.end, 1);
      clear_rows(a, w, kRows, first_unused_token(a) + w.entry, a.tokens, entries_of(a));
      continue;
    }
    const int64_t first_row = static_cast<int64_t>(w.head) * a.head_dim + w.row0;
    State* state = static_cast<State*>(a.state) + first_row * kDState;
    const int valid_rows = min(kRows, a.head_dim - w.row0);

    // The state is the longest wait: its loads go first.
    Tile tile;
    {
      const State* slot = state + q.read * a.state_stride;
#pragma unroll
      for (int r = 0; r < kRowTile; ++r) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
          if (q.read >= 0 && row + r < valid_rows) {
            v = load_columns(slot + (row + r) * kDState, 4 * (lane + kLanes * i), kDState, vector_state);
          }
          tile.s[r][4 * i] = v.x, tile.s[r][4 * i + 1] = v.y, tile.s[r][4 * i + 2] = v.z, tile.s[r][4 * i + 3] = v.w;
        }
      }
    }

    const int64_t group = w.head / (a.heads / a.groups);
    const Io* in_x = static_cast<const Io*>(a.x) + first_row;
    const Io* in_B = static_cast<const Io*>(a.B) + group * kDState;
    const Io* in_C = static_cast<const Io*>(a.C) + group * kDState;
    const bool vector_x = kRows % kPerAccess == 0 && (a.flags & kFlagVectorX);
    const bool vector_B = kDState % kPerAccess == 0 && (a.flags & kFlagVectorB);
    const bool vector_C = kDState % kPerAccess == 0 && (a.flags & kFlagVectorC);
    const auto stage_chunk = [&](Staged& to, int64_t t0) {
      const int n_tokens = min(kChunk, static_cast<int>(q.end - t0));
      stage(to.B, in_B + t0 * a.B_stride, a.B_stride, n_tokens, kDState, vector_B);
      stage(to.C, in_C + t0 * a.C_stride, a.C_stride, n_tokens, kDState, vector_C);
      stage(to.x, in_x + t0 * a.x_stride, a.x_stride, n_tokens, valid_rows, vector_x);
    };

    __syncthreads();  // the last item's readers are done
    stage_chunk(staged[0], q.begin);
    float dt = 0.f;
    if (q.begin + static_cast<int>(threadIdx.x) < q.end && threadIdx.x < kChunk) {
      dt = load_dt(a, a.dt, (q.begin + static_cast<int>(threadIdx.x)) * a.dt_stride + w.head);
    }
    const float A = per_column ? 0.f : a.A[w.head];
    const float* column_A = a.A + static_cast<int64_t>(w.head) * kDState;
    const float bias = a.dt_bias ? a.dt_bias[w.head] : 0.f;
    const float D = a.D ? a.D[w.head] : 0.f;
    const int out_row = threadIdx.x % kRows;
    const Io* z = static_cast<const Io*>(a.z) + first_row + out_row;
    Io* y = static_cast<Io*>(a.y) + first_row + out_row;

    int buffer = 0;
    for (int t0 = q.begin; t0 < q.end; t0 += kChunk, buffer ^= 1) {
      const int n_tokens = min(kChunk, q.end - t0);
      if (threadIdx.x < n_tokens) {
        const float d = step_size(dt, bias, a.flags, a.dt_min, a.dt_max);
        steps[threadIdx.x] = {expf(d * A), d};
      }
      copy_async_wait_all();
      __syncthreads();  // the chunk and its steps are staged, and nobody reads the other buffer
      if (kWiden) {
        for (int i = threadIdx.x; i < n_tokens * (kColumns / 4); i += kThreads) {
          const int t = i / (kColumns / 4), n = i % (kColumns / 4) * 4;
          *reinterpret_cast<float4*>(&widened.B[t][n]) = load4(&staged[buffer].B[t][n]);
          *reinterpret_cast<float4*>(&widened.C[t][n]) = load4(&staged[buffer].C[t][n]);
        }
      }
      const int t1 = t0 + kChunk;
      if (t1 < q.end) {
        stage_chunk(staged[buffer ^ 1], t1);
        if (threadIdx.x < kChunk && t1 + static_cast<int>(threadIdx.x) < q.end) {
          dt = load_dt(a, a.dt, (t1 + static_cast<int>(threadIdx.x)) * a.dt_stride + w.head);
        }
      }
      const float(*B)[kColumns] = staged[buffer].B;
      const float(*C)[kColumns] = staged[buffer].C;
      const Io(*x)[kStagedRows] = staged[buffer].x;

      int t = 0;
      if (!per_column && !a.checkpoint_slots) {
        for (; t + kBatch <= n_tokens; t += kBatch) {
          advance_tokens<kBatch, false>(tile, B + t, C + t, x + t, steps + t, column_A, sums + t * kSumStride, lane, row);
        }
      }
      for (; t < n_tokens; ++t) {
        if (per_column) {
          advance_tokens<1, true>(tile, B + t, C + t, x + t, steps + t, column_A, sums + t * kSumStride, lane, row);
        } else {
          advance_tokens<1, false>(tile, B + t, C + t, x + t, steps + t, column_A, sums + t * kSumStride, lane, row);
        }
        const int64_t slot = a.checkpoint_slots ? a.checkpoint_slots[t0 + t] : -1;
        if (slot >= 0 && slot < a.slots) {
          store_tile(a, tile, state, slot, t0 + t - q.begin, first_row, valid_rows, lane, row);
        }
      }
      __syncthreads();  // the sums are complete
      for (int u = threadIdx.x / kRows; u < n_tokens && out_row < valid_rows; u += kThreads / kRows) {
        float out = sums[u * kSumStride + out_row];
        if (a.D) out = fmaf(D, to_f32(x[u][out_row]), out);
        if (a.z) out *= silu(to_f32(z[(t0 + u) * a.z_stride]));
        y[(t0 + u) * a.y_stride] = from_f32<Io>(out);
      }
    }
    if (q.write >= 0) {
      store_tile(a, tile, state, q.write, q.end - q.begin - 1, first_row, valid_rows, lane, row);
    }
    clear_rows(a, w, kRows, first_unused_token(a) + w.entry, a.tokens, entries_of(a));
  }
}

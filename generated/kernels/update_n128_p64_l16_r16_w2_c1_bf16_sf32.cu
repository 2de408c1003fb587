// SPDX-License-Identifier: Apache-2.0
//
// ssm_update_n128_p64_l16_r16_w2_c1_bf16_sf32
//
// Decode: the selective state-space scan for the 1 to 8 tokens that a sequence has in a step, of Mamba-2 (one A a head)
// and Mamba-1 (one A a column). The state is read once and written once. For token t of a sequence, head h, group
// g = h / (heads / groups), row p, column n:
//
//   d      = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//   y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * silu(z[t,h,p])
//
// A lane owns 4 rows by 8 columns, the columns as 16-byte pieces l, l + 16, ... of 4: all of its state is asked for in
// accesses issued back to back, before anything is waited for. Each lane loads the B and C of its own columns, which
// serve all its rows, straight into registers: nothing passes through shared memory, and no warp waits for another.
// Every lane computes softplus and decay itself, while the state is on its way. y is summed by column bits from high to
// low, in the order of `recurrent` tiled: every number of lanes, rows and warps gives the same bits.
//
// Launch: one block a (sequence, head, run of rows), runs of rows fastest, so that blocks that run together touch
// memory that lies together:
//   grid.x = max(sequences, 1) * heads * ceil(head_dim / rows), at most 2^31 - 1 (blocks stride beyond that);
//   block = (64, 1, 1); no shared memory; rows = 16.
// Longer sequences are right too, and slow: another family is for them.
// One argument, ScanArgs by value; the struct below is its table. Compile with -fmad=false: products and sums are
// fused where fmaf says so and nowhere else, so that the order of rounding is what this file says.
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Io = __nv_bfloat16;  // x, z, y, B, C
using State = float;       // the stored state; arithmetic is f32

constexpr int kDState = 128;  // columns of a row
constexpr int kHeadDim = 64;  // rows of a head, 0: known when it runs
constexpr int kLanes = 16;    // lanes that share a row
constexpr int kRows = 16;     // rows of a block
constexpr int kRowTile = 4;   // rows a lane owns
constexpr int kPieces = 2;    // pieces of a row that a lane owns
constexpr int kChunk = 1;     // tokens of a longer sequence that are asked for at once
constexpr int kTogether = 2;  // of them, rows that it carries at once through several tokens
constexpr int kThreads = 64;

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

// A value that the compiler knows nothing of from here on: what it is worked out from comes before, and what is worked
// out from it stays behind, so that neither gets between a load and those that wait for it.
template <typename T>
__device__ __forceinline__ T opaque(T v) {
#if !defined(SSM_EMULATOR)
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(v));
  } else {
    asm volatile("" : "+r"(v));
  }
#endif
  return v;
}
// The numbers of one entry of a launch's sequence list, asked for together, so that they are waited for once. What they
// mean for the state and for the rest are questions of their own: the state's loads wait for no other answer.
struct Entry {
  int begin = 0;   // first token
  int end = 0;     // one past the last token
  int read = -1;   // slots as the lists say
  int write = -1;  // where there is no list, unused
  int resume = 0;  // not 0: the state goes on from the read slot
  int last = 0;    // one past the last token of all sequences
};

// The sequence that an entry of the list visits, out of range: nothing.
__device__ __forceinline__ int sequence_of(const ScanArgs& a, int entry) {
  if (!a.sequence_order) return entry;
  return entry < a.sequences ? a.sequence_order[entry] : -1;
}

// Of sequence s, which is there. `zero` is 0.
__device__ __forceinline__ Entry load_entry_of(const ScanArgs& a, uint32_t s, uint32_t zero) {
  s += zero;
  Entry e;
  e.read = static_cast<int>(s), e.end = a.tokens, e.last = a.tokens, e.resume = a.state != nullptr;
  if (a.read_slots) e.read = a.read_slots[s];
  if (a.cu_seqlens) e.begin = a.cu_seqlens[s], e.end = a.cu_seqlens[s + 1];
  if (a.write_slots) e.write = a.write_slots[s];
  if (a.state && a.resume) e.resume = a.resume[s];
  if (a.cu_seqlens) e.last = a.cu_seqlens[a.sequences + zero];
  return e;
}

// NOTE: the compiler is not to know that every lane has the same numbers: in registers that a warp shares it would move
// each as soon as it is asked for, and wait there before it asks for the next. The number of a thread's block among
// those of a block, which is 0, it does not look through.
__device__ __forceinline__ uint32_t unknown_zero() { return threadIdx.x / kThreads; }

__device__ __forceinline__ Entry load_entry(const ScanArgs& a, int64_t entry) {
  const int s = sequence_of(a, static_cast<int>(entry));
  if (s >= 0 && s < a.sequences) return load_entry_of(a, s, 0);
  return Entry();
}

// Tokens from here on belong to no sequence.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  return a.cu_seqlens ? min(max(a.cu_seqlens[a.sequences], 0), a.tokens) : a.tokens;
}

__device__ __forceinline__ bool in_pool(const ScanArgs& a, int64_t slot) {
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(a.slots);
}

// Slot of the initial state, -1: start from zero.
__device__ __forceinline__ int initial_slot(const ScanArgs& a, const Entry& e) {
  return e.resume && e.read != a.pad_slot && in_pool(a, e.read) ? e.read : -1;
}

// Slot that the lists give the final state, -1: discard it.
__device__ __forceinline__ int listed_write(const ScanArgs& a, const Entry& e) {
  return !a.state ? -1 : a.write_slots ? e.write : e.read;
}

// NOTE: a slot out of range behaves as padding, so no data on the device can reach memory outside the pool. A fresh
// sequence's read slot is looked at only for padding. An entry out of range is padding without tokens.
__device__ __forceinline__ bool is_padding(const ScanArgs& a, const Entry& e) {
  const int write = listed_write(a, e);
  return e.read == a.pad_slot || (e.resume && !in_pool(a, e.read)) || (write != -1 && !in_pool(a, write));
}

// Slot of the final state: an empty sequence that would write back what it read leaves the slot alone.
__device__ __forceinline__ int final_slot(const ScanArgs& a, const Entry& e, int initial) {
  const int write = listed_write(a, e);
  return e.end <= e.begin && initial == write ? -1 : write;
}

// A condition of an entry's numbers, which is the same on every lane, as one that the compiler knows to be so.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(kWholeWarp, condition); }

// Entries of a launch's list: one a sequence; with none, one entry's blocks still clear the unused rows of y.
__device__ __forceinline__ int64_t entries_of(const ScanArgs& a) { return max(a.sequences, 1); }

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

// a / b for numbers below kShort, by one reciprocal. NOTE: exact. With a half added no quotient is nearer to a whole
// number than 1 / 2b, and an error of 2^-22 of it, which is what the instruction may have, is less than that.
constexpr int64_t kShort = 1 << 21;
__device__ __forceinline__ uint32_t divide_short(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Whether the divisions of `find_short_work` and `short_group_of` are of short numbers.
__device__ __forceinline__ bool is_short_work(const ScanArgs& a, int64_t item, uint32_t runs) {
  return item < kShort && static_cast<uint64_t>(a.heads) * max(runs, static_cast<uint32_t>(a.groups)) < kShort;
}

// Where an item of work lies, by two divisions that do not wait for each other: `find_work` has one after the other,
// and of integers, which a launch of microseconds feels. With head_dim known when this is compiled one is a shift.
__device__ __forceinline__ Work find_short_work(const ScanArgs& a, uint32_t item, int rows, uint32_t runs) {
  const uint32_t heads = static_cast<uint32_t>(a.heads);
  const uint32_t row_of_heads = kHeadDim ? item / runs : divide_short(item, runs);
  uint32_t entry;
  if (kHeadDim && (heads & (heads - 1)) == 0) {
    entry = row_of_heads >> (31 - __clz(heads));  // the usual number of heads
  } else {
    entry = divide_short(item, heads * runs);
  }
  Work w;
  w.entry = entry;
  w.head = static_cast<int>(row_of_heads - entry * heads);
  w.row0 = static_cast<int>(item - row_of_heads * runs) * rows;
  return w;
}

// The group of a head, h / (heads / groups) in one division.
__device__ __forceinline__ uint32_t short_group_of(const ScanArgs& a, int head) {
  return divide_short(static_cast<uint32_t>(head) * a.groups, a.heads);
}
__device__ __forceinline__ int64_t group_of(const ScanArgs& a, int head) {
  return static_cast<int64_t>(head) * a.groups / a.heads;
}

// One token's step of four columns: S = decay * S + dx * B, and the sum of S * C over them.
__device__ __forceinline__ float advance(float* s, float4 decay, float dx, float4 b, float4 c) {
  s[0] = fmaf(decay.x, s[0], dx * b.x);
  s[1] = fmaf(decay.y, s[1], dx * b.y);
  s[2] = fmaf(decay.z, s[2], dx * b.z);
  s[3] = fmaf(decay.w, s[3], dx * b.w);
  return fmaf(s[3], c.w, fmaf(s[2], c.z, fmaf(s[1], c.y, s[0] * c.x)));
}

// Pieces of rows: the 16 bytes of state that a lane moves in one access, and the columns of B and C that go with them.
constexpr int kPiece = 16 / sizeof(State);  // columns of a piece
constexpr int kPieceQuads = kPiece / 4;

// kPiece columns as they are stored, four bytes a word, columns from low bits to high.
template <typename T>
struct Piece {
  static constexpr int kWords = kPiece * sizeof(T) / 4;
  uint32_t w[kWords];
};

// Unsigned integers of the size of a storage type.
template <int kBytes>
struct BitsOf {
  using type = uint32_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<1> {
  using type = uint8_t;
};

// An element from its bits, the low ones of a word.
__device__ __forceinline__ float element_of(uint32_t bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ __nv_bfloat16 element_of(uint32_t bits, __nv_bfloat16) {
  __nv_bfloat16_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __nv_bfloat16(raw);
}
__device__ __forceinline__ __half element_of(uint32_t bits, __half) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half(raw);
}

template <typename T>
__device__ __forceinline__ void clear(Piece<T>& piece) {
#pragma unroll
  for (int i = 0; i < Piece<T>::kWords; ++i) piece.w[i] = 0u;
}

__device__ __forceinline__ uint4 load_words(const uint4* p, bool streaming) {
  return streaming ? load_streaming(p) : *p;
}

// Columns [n, n + kPiece) of a row in accesses of up to 16 bytes, which the caller knows to be aligned and to lie
// wholly inside or outside the row; columns from d_state on become 0.
template <bool kStreaming, typename T>
__device__ __forceinline__ void load_piece(Piece<T>& piece, const T* row, int n, int d_state) {
  if constexpr (Piece<T>::kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Piece<T>::kWords; i += 4) {
      const int at = n + i * static_cast<int>(4 / sizeof(T));
      uint4 v = make_uint4(0u, 0u, 0u, 0u);
      if (at < d_state) v = load_words(reinterpret_cast<const uint4*>(row + at), kStreaming);
      piece.w[i] = v.x, piece.w[i + 1] = v.y, piece.w[i + 2] = v.z, piece.w[i + 3] = v.w;
    }
  } else {
    static_assert(Piece<T>::kWords == 2, "four columns of two bytes");
    uint2 v = make_uint2(0u, 0u);
    if (n < d_state) v = *reinterpret_cast<const uint2*>(row + n);
    piece.w[0] = v.x, piece.w[1] = v.y;
  }
}

// The same element by element, for rows at any place.
template <typename T>
__device__ __forceinline__ void load_elements(Piece<T>& piece, const T* row, int n, int d_state) {
  using Bits = typename BitsOf<sizeof(T)>::type;
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < Piece<T>::kWords; ++i) {
    uint32_t word = 0u;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      const int at = n + i * kPerWord + k;
      if (at < d_state) word |= static_cast<uint32_t>(reinterpret_cast<const Bits*>(row)[at]) << (k * 8 * sizeof(T));
    }
    piece.w[i] = word;
  }
}

// x of kCount rows from row `first` on: elements in as few accesses as their alignment allows, which is that of the
// first element of a run of rows, and rows from valid_rows on become 0. Whole accesses are valid or not.
template <int kCount>
__device__ __forceinline__ void load_run(Io (&to)[kCount], const Io* rows, int first, int valid_rows) {
  constexpr int kBytes = kCount * sizeof(Io);
  constexpr int kAccess = kBytes < 16 ? kBytes : 16;
  constexpr int kElements = kAccess / sizeof(Io);
#pragma unroll
  for (int r = 0; r < kCount; r += kElements) {
    const bool valid = first + r < valid_rows;
    const Io* from = rows + first + r;
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    if constexpr (kAccess == 16) {
      if (valid) v = *reinterpret_cast<const uint4*>(from);
    } else if constexpr (kAccess == 8) {
      const uint2 half = valid ? *reinterpret_cast<const uint2*>(from) : make_uint2(0u, 0u);
      v.x = half.x, v.y = half.y;
    } else if constexpr (kAccess == 4) {
      if (valid) v.x = *reinterpret_cast<const uint32_t*>(from);
    } else {
      if (valid) v.x = *reinterpret_cast<const uint16_t*>(from);
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      to[r + k] = element_of(words[k * sizeof(Io) / 4] >> (k * 8 * sizeof(Io) % 32), Io());
    }
  }
}

__device__ __forceinline__ void store_piece(State* row, int n, const Piece<State>& piece, int d_state) {
  if (n >= d_state) return;
  store_streaming(reinterpret_cast<uint4*>(row + n), make_uint4(piece.w[0], piece.w[1], piece.w[2], piece.w[3]));
}

__device__ __forceinline__ void store_elements(State* row, int n, const Piece<State>& piece, int d_state) {
  using Bits = typename BitsOf<sizeof(State)>::type;
  constexpr int kPerWord = 4 / sizeof(State);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    if (n + i < d_state) {
      reinterpret_cast<Bits*>(row)[n + i] =
          static_cast<Bits>(piece.w[i / kPerWord] >> (i % kPerWord * 8 * static_cast<int>(sizeof(State))));
    }
  }
}

// Quad q of a piece as floats; integers are not scaled.
__device__ __forceinline__ float4 quad_of(const Piece<float>& p, int q) {
  return make_float4(__uint_as_float(p.w[4 * q]), __uint_as_float(p.w[4 * q + 1]), __uint_as_float(p.w[4 * q + 2]),
                     __uint_as_float(p.w[4 * q + 3]));
}
__device__ __forceinline__ float4 quad_of(const Piece<__nv_bfloat16>& p, int q) {
  return widen4(make_uint2(p.w[2 * q], p.w[2 * q + 1]), __nv_bfloat16());
}
__device__ __forceinline__ float4 quad_of(const Piece<__half>& p, int q) {
  return widen4(make_uint2(p.w[2 * q], p.w[2 * q + 1]), __half());
}
__device__ __forceinline__ float widen_byte(uint32_t biased, int k) {
  // 2^23 + b as a float has b in its low byte: exact, and two instructions where a conversion runs at quarter rate.
  return __uint_as_float(0x4b000000u | ((biased >> (8 * k)) & 0xffu)) - 8388736.f;
}
__device__ __forceinline__ float4 quad_of(const Piece<int8_t>& p, int q) {
  const uint32_t biased = p.w[q] ^ 0x80808080u;
  return make_float4(widen_byte(biased, 0), widen_byte(biased, 1), widen_byte(biased, 2), widen_byte(biased, 3));
}

__device__ __forceinline__ uint32_t pack2(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162_raw raw = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ uint32_t pack2(float low, float high, __half) {
  const __half2_raw raw = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
}
__device__ __forceinline__ uint32_t pack2(__nv_bfloat16 low, __nv_bfloat16 high) {
  return static_cast<uint32_t>(__nv_bfloat16_raw(low).x) | static_cast<uint32_t>(__nv_bfloat16_raw(high).x) << 16;
}
__device__ __forceinline__ uint32_t pack2(__half low, __half high) {
  return static_cast<uint32_t>(__half_raw(low).x) | static_cast<uint32_t>(__half_raw(high).x) << 16;
}

// What an 8-bit row is stored with.
struct RowScale {
  float stored = 0.f;   // what a stored integer is multiplied with
  float inverse = 0.f;  // what takes a value to integers, after `lift`
  float lift = 1.f;     // brings rows of tiny values to where their inverse is finite
};

// Rounds four values to quad q of a piece. `random` is used where `stochastic`, `scale` by 8-bit rows.
__device__ __forceinline__ void round_quad(Piece<float>& p, int q, const float* s, uint4, bool, const RowScale&) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p.w[4 * q + i] = __float_as_uint(s[i]);
}
template <typename T>
__device__ __forceinline__ void round_quad_16(Piece<T>& p, int q, const float* s, uint4 random, bool stochastic) {
  if (stochastic) {
    p.w[2 * q] = pack2(round_to(s[0], random.x, true, T()), round_to(s[1], random.y, true, T()));
    p.w[2 * q + 1] = pack2(round_to(s[2], random.z, true, T()), round_to(s[3], random.w, true, T()));
  } else {
    p.w[2 * q] = pack2(s[0], s[1], T());
    p.w[2 * q + 1] = pack2(s[2], s[3], T());
  }
}
__device__ __forceinline__ void round_quad(Piece<__nv_bfloat16>& p, int q, const float* s, uint4 random,
                                           bool stochastic, const RowScale&) {
  round_quad_16(p, q, s, random, stochastic);
}
__device__ __forceinline__ void round_quad(Piece<__half>& p, int q, const float* s, uint4 random, bool stochastic,
                                           const RowScale&) {
  round_quad_16(p, q, s, random, stochastic);
}

// A value in steps of its row's scale, to the nearest integer or, where stochastic, to one of its two neighbours: -127
// to 127 in the low byte.
__device__ __forceinline__ uint32_t to_steps(float v, uint32_t random, bool stochastic, const RowScale& scale) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum's low bits are the integer
  v *= scale.lift;
  if (!stochastic) return __float_as_uint(fmaf(v, scale.inverse, kRound)) & 0xffu;
  const float below = floorf(fmaf(v, scale.inverse, static_cast<float>(random >> 8) * 0x1p-24f));
  return __float_as_uint(fminf(below, 127.f) + kRound) & 0xffu;
}
__device__ __forceinline__ void round_quad(Piece<int8_t>& p, int q, const float* s, uint4 random, bool stochastic,
                                           const RowScale& scale) {
  p.w[q] = to_steps(s[0], random.x, stochastic, scale) | to_steps(s[1], random.y, stochastic, scale) << 8 |
           to_steps(s[2], random.z, stochastic, scale) << 16 | to_steps(s[3], random.w, stochastic, scale) << 24;
}

// The scale that takes a row's largest magnitude to 127, from the bits of that magnitude: as integers they order NaN
// above infinity, so that neither is lost.
__device__ __forceinline__ RowScale row_scale(uint32_t largest_bits) {
  const float largest = __uint_as_float(largest_bits);
  RowScale scale;
  scale.stored = largest / 127.f;
  if (scale.stored == 0.f) return scale;
  if (largest < 0x1p-100f) scale.lift = 0x1p64f;
  scale.inverse = 127.f / (largest * scale.lift);
  return scale;
}

// v[index], by halves: with an index that differs from lane to lane the array must not leave its registers.
template <typename T, int kCount>
__device__ __forceinline__ T pick(const T (&v)[kCount], int index) {
  T left[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) left[i] = v[i];
#pragma unroll
  for (int half = kCount / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) left[i] = index & half ? left[i + half] : left[i];
  }
  return left[0];
}

// x of neighbouring rows of one head as it is stored, four bytes a word.
using IoBits = typename BitsOf<sizeof(Io)>::type;

template <int kCount>
struct Run {
  static constexpr int kWords = (kCount * static_cast<int>(sizeof(Io)) + 3) / 4;
  uint32_t w[kWords];
  __device__ __forceinline__ Io at(int r) const {
    return element_of(pick(w, r * static_cast<int>(sizeof(Io)) / 4) >> (r * 8 * sizeof(Io) % 32), Io());
  }
};

// Rows [first, first + kCount), in as few accesses as their alignment allows, which is that of the first element of a
// run of rows. Rows from valid_rows on become 0; whole accesses are valid or not.
template <int kCount>
__device__ __forceinline__ void load_run(Run<kCount>& to, const Io* rows, int first, int valid_rows) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Io));
  constexpr int kAccess = kBytes < 16 ? kBytes : 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += kAccess) {
    const int row = first + i / static_cast<int>(sizeof(Io));
    const bool valid = row < valid_rows;
    uint32_t* words = to.w + i / 4;
    if constexpr (kAccess == 16) {
      const uint4 v = valid ? *reinterpret_cast<const uint4*>(rows + row) : make_uint4(0u, 0u, 0u, 0u);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (kAccess == 8) {
      const uint2 v = valid ? *reinterpret_cast<const uint2*>(rows + row) : make_uint2(0u, 0u);
      words[0] = v.x, words[1] = v.y;
    } else {
      words[0] = valid ? *reinterpret_cast<const typename BitsOf<kAccess>::type*>(rows + row) : 0u;
    }
  }
}

// The same element by element, for rows at any place.
template <int kCount>
__device__ __forceinline__ void load_run_elements(Run<kCount>& to, const Io* rows, int first, int valid_rows) {
  constexpr int kPerWord = 4 / sizeof(Io);
#pragma unroll
  for (int i = 0; i < Run<kCount>::kWords; ++i) {
    uint32_t word = 0u;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      const int row = i * kPerWord + k;
      if (row < kCount && first + row < valid_rows) {
        word |= static_cast<uint32_t>(reinterpret_cast<const IoBits*>(rows)[first + row]) << (k * 8 * sizeof(Io));
      }
    }
    to.w[i] = word;
  }
}

// 8-bit rows: their scale, and numbers in and out of them.

// 1 / v with an error of 2^-22 of it, for normal numbers whose reciprocal is one.
__device__ __forceinline__ float reciprocal(float v) {
#if defined(SSM_EMULATOR)
  return 1.f / v;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
#endif
}

// The scale that takes a row's largest magnitude to 127, and what takes a value to steps of it. NaN and infinity are
// not lost. A row of zeros has scale 0; rows smaller than 2^-119 share the least scale that is a normal number.
__device__ __forceinline__ RowScale scale_of_largest(float largest) {
  const float least = largest < 0x1p-119f ? 0x1p-119f : largest;
  RowScale scale;
  scale.stored = least * (1.f / 127.f);
  scale.inverse = reciprocal(scale.stored);
  if (largest == 0.f) scale.stored = 0.f;
  return scale;
}

// The larger of two magnitudes, NaN if one is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
#if !defined(SSM_EMULATOR) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
#else
  // As integers NaN is above infinity.
  return __uint_as_float(max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu));
#endif
}

// Of a row of which each of kLanes lanes has kCount values.
template <int kLanes, int kCount>
__device__ __forceinline__ RowScale scale_of(const float (&s)[kCount]) {
  float largest = 0.f;
#pragma unroll
  for (int n = 0; n < kCount; ++n) largest = larger_magnitude(largest, s[n]);
#pragma unroll
  for (int bit = kLanes / 2; bit >= 1; bit /= 2) {
    largest = larger_magnitude(largest, __shfl_xor_sync(kWholeWarp, largest, bit));
  }
  return scale_of_largest(largest);
}

// Quad q of a piece as floats; integers are not scaled.
template <typename T>
__device__ __forceinline__ float4 widen_quad(const Piece<T>& p, int q) {
  if constexpr (sizeof(T) == 1) {
    // 2^23 + b as a float has b in its low byte: two instructions, where a conversion runs at a quarter of the rate.
    const uint32_t biased = p.w[q] ^ 0x80808080u;
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440 + k)) - 8388736.f;
    return make_float4(v[0], v[1], v[2], v[3]);
  } else {
    return quad_of(p, q);
  }
}

// Four values to the nearest numbers of quad q of a piece.
template <typename T>
__device__ __forceinline__ void round_nearest(Piece<T>& p, int q, const float* s, const RowScale& scale) {
  if constexpr (sizeof(T) == 1) {
    constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum's low byte is the integer
    uint32_t byte[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) byte[i] = __float_as_uint(fmaf(s[i], scale.inverse, kRound));
    p.w[q] = __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040), 0x5410);
  } else {
    round_quad(p, q, s, make_uint4(0u, 0u, 0u, 0u), false, scale);
  }
}

constexpr int kSlice = kPieces * kPiece;   // columns a lane owns of a row
constexpr bool kScaled = sizeof(State) == 1;  // 8-bit states have a scale a row
constexpr bool kRounds = sizeof(State) < 4;   // stores lose bits
constexpr bool kWholeRuns = kHeadDim > 0 && kHeadDim % kRows == 0;  // no run of rows is cut short
// In-lane sums are halved as if there were a power of two of pieces, so that zeros are added whatever the lanes.
constexpr int kSummed = kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;

__device__ __forceinline__ int column_of(int lane, int piece) { return kPiece * (lane + kLanes * piece); }

// What a lane reads of one token, as it is stored, so that nothing is waited for where it is asked for: dt, its columns
// of B and C, which serve all its rows, x of its rows and z of the row whose y it stores.
template <int kCount>
struct Token {
  uint32_t dt_f32, dt_io;  // one of them
  Piece<Io> B[kPieces], C[kPieces];
  Run<kCount> x;
  uint32_t z;
};

// Where a lane works: its first row in the run, the row that it stores y of, and which of them are there.
struct Place {
  int lane, row, own, valid_rows;
  bool stores_y;
  __device__ __forceinline__ bool has(int r) const { return kWholeRuns || r < valid_rows; }
};

// A lane's rows [first, first + kCount).
template <int kCount>
__device__ __forceinline__ Place place_of(const Work& w, int head_dim, int first) {
  Place at;
  at.lane = threadIdx.x % kLanes;
  at.row = threadIdx.x / kLanes * kRowTile + first;
  at.own = at.row + folded_index<kLanes, kCount>(at.lane);
  at.stores_y = at.lane % (kLanes / kCount) == 0;
  at.valid_rows = min(kRows, head_dim - w.row0);
  return at;
}

// kFast: state, B, C and x take accesses of 16 bytes (or all that a lane needs of them), and A is one a head.
template <bool kFast, int kCount>
__device__ __forceinline__ void load_token(Token<kCount>& to, const ScanArgs& a, const Work& w, int64_t row0,
                                           int64_t group, const Place& at, int64_t t) {
  const int64_t dt = t * a.dt_stride + w.head;
  to.dt_f32 = to.dt_io = 0u;
  if (a.flags & kFlagDtF32) to.dt_f32 = static_cast<const uint32_t*>(a.dt)[dt];
  if (!(a.flags & kFlagDtF32)) to.dt_io = static_cast<const IoBits*>(a.dt)[dt];
  const Io* x = static_cast<const Io*>(a.x) + (row0 + t * a.x_stride);
  const Io* B = static_cast<const Io*>(a.B) + (group * kDState + t * a.B_stride);
  const Io* C = static_cast<const Io*>(a.C) + (group * kDState + t * a.C_stride);
  if constexpr (kFast) {
    load_run(to.x, x, at.row, kWholeRuns ? kRows : at.valid_rows);
  } else {
    load_run_elements(to.x, x, at.row, at.valid_rows);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int n = column_of(at.lane, i);
    if constexpr (kFast) {
      load_piece<false>(to.B[i], B, n, kDState);
      load_piece<false>(to.C[i], C, n, kDState);
    } else {
      load_elements(to.B[i], B, n, kDState);
      load_elements(to.C[i], C, n, kDState);
    }
  }
  to.z = 0u;
  if (a.z && at.has(at.own)) to.z = static_cast<const IoBits*>(a.z)[row0 + at.own + t * a.z_stride];
}

// A head's numbers, which all its tokens share.
struct Head {
  float A, bias, D;
};

__device__ __forceinline__ Head load_head(const ScanArgs& a, int head, bool per_column) {
  Head found{0.f, 0.f, 0.f};
  if (!per_column) found.A = a.A[head];
  if (a.dt_bias) found.bias = a.dt_bias[head];
  if (a.D) found.D = a.D[head];
  return found;
}

__device__ __forceinline__ float step_of(const ScanArgs& a, uint32_t dt_f32, uint32_t dt_io, float bias) {
  const float dt = a.flags & kFlagDtF32 ? __uint_as_float(dt_f32) : to_f32(element_of(dt_io, Io()));
  return step_size(dt, bias, a.flags, a.dt_min, a.dt_max);
}

__device__ __forceinline__ float opaque_f32(float v) { return __uint_as_float(opaque(__float_as_uint(v))); }

// What makes y of a lane's row from its sum of S * C, worked out before the sum is there.
struct Output {
  int64_t at;  // of y, -1: another lane stores it
  float x, gate;
};

template <int kCount>
__device__ __forceinline__ Output output_of(const ScanArgs& a, int64_t row0, int64_t t, const Place& at,
                                            const Token<kCount>& token) {
  Output to;
  to.at = at.stores_y && at.has(at.own) ? row0 + at.own + t * a.y_stride : -1;
  to.x = to_f32(token.x.at(folded_index<kLanes, kCount>(at.lane)));
  to.gate = a.z ? silu(to_f32(element_of(token.z, Io()))) : 1.f;
  return to;
}

__device__ __forceinline__ void store_y(const ScanArgs& a, const Output& to, float out, float D) {
  if (a.D) out = fmaf(D, to.x, out);
  if (a.z) out *= to.gate;
  if (to.at >= 0) static_cast<Io*>(a.y)[to.at] = from_f32<Io>(out);
}

// Sums over columns go by column bits from high to low: pieces of a lane, lanes, quads of a piece. Of 8-bit states,
// whose pieces have 16 columns in every configuration, a piece's quads come first.
constexpr int kShares = kScaled ? 1 : kPieceQuads;
__device__ __forceinline__ void share_quads(float (&sums)[kShares][kSummed], int piece,
                                            float (&quads)[kPieceQuads]) {
  if constexpr (kScaled) {
    sums[0][piece] = sum_quads(quads);
  } else {
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) sums[q][piece] = quads[q];
  }
}

// Of so many sums that lanes have shares of, the one that is this lane's, whole on every lane that has the same.
template <int kCount>
__device__ __forceinline__ float sum_over_lanes(float (&sums)[kShares][kCount], int lane) {
  float quads[kShares];
#pragma unroll
  for (int q = 0; q < kShares; ++q) {
    fold_lanes<kLanes, kCount>(sums[q], lane);
    quads[q] = sum_lanes(sums[q][0], kLanes / kCount);
  }
  return sum_quads(quads);
}

__device__ __forceinline__ void put_quad(float* to, float4 v) { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }

// One token's step of a lane's rows; leaves its shares of their sums from `first` on. `decays` has that of each row.
template <bool kPerColumn, int kCount>
__device__ __forceinline__ void advance_rows(float (&s)[kTogether][kSlice], const Token<kTogether>& token, float d,
                                             const float (&decays)[kTogether], const float* column_A, int lane,
                                             float (&sums)[kShares][kCount], int first) {
  float dx[kTogether];
#pragma unroll
  for (int r = 0; r < kTogether; ++r) dx[r] = d * to_f32(token.x.at(r));
  float pieces[kTogether][kShares][kSummed] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    float quads[kTogether][kPieceQuads];
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) {
      const float4 b = quad_of(token.B[i], q), c = quad_of(token.C[i], q);
      float4 columns = make_float4(1.f, 1.f, 1.f, 1.f);
      if constexpr (kPerColumn) {
        const int n = column_of(lane, i) + 4 * q;
        if (n + 0 < kDState) columns.x = expf(d * column_A[n + 0]);
        if (n + 1 < kDState) columns.y = expf(d * column_A[n + 1]);
        if (n + 2 < kDState) columns.z = expf(d * column_A[n + 2]);
        if (n + 3 < kDState) columns.w = expf(d * column_A[n + 3]);
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const float one = decays[r];
        const float4 decay =
            kPerColumn ? make_float4(one * columns.x, one * columns.y, one * columns.z, one * columns.w)
                       : make_float4(one, one, one, one);
        quads[r][q] = advance(s[r] + i * kPiece + 4 * q, decay, dx[r], b, c);
      }
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) share_quads(pieces[r], i, quads[r]);
  }
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
#pragma unroll
    for (int q = 0; q < kShares; ++q) sums[q][first + r] = sum_quads(pieces[r][q]);
  }
}

// Stores a lane's rows to a slot. `row0` is the run's first row among heads * head_dim.
template <bool kFast>
__device__ __forceinline__ void store_rows(const ScanArgs& a, const float (&s)[kTogether][kSlice], int64_t slot,
                                           int token, int64_t row0, const Place& at) {
  Rounding rounding;
  if constexpr (kRounds) rounding = find_rounding(a.rounding_key);
  State* rows = static_cast<State*>(a.state) + slot * a.state_stride + (row0 + at.row) * kDState;
  if constexpr (kScaled) __syncwarp();  // every lane has read the scales that one of them writes over
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
    RowScale scale;
    if constexpr (kScaled) scale = scale_of<kLanes>(s[r]);
    if (at.has(at.row + r)) {
      if constexpr (kScaled) {
        if (at.lane == 0) a.state_scale[slot * a.state_scale_stride + row0 + at.row + r] = scale.stored;
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int n = column_of(at.lane, i);
        Piece<State> piece;
#pragma unroll
        for (int q = 0; q < kPieceQuads; ++q) {
          if (kRounds && rounding.stochastic) {
            const uint32_t row = static_cast<uint32_t>(row0 + at.row + r);
            const uint4 random = draw4(rounding, row, (kDState + 3) / 4, n / 4 + q, slot, token);
            round_quad(piece, q, s[r] + i * kPiece + 4 * q, random, true, scale);
          } else {
            round_nearest(piece, q, s[r] + i * kPiece + 4 * q, scale);
          }
        }
        if constexpr (kFast) {
          store_piece(rows + r * kDState, n, piece, kDState);
        } else {
          store_elements(rows + r * kDState, n, piece, kDState);
        }
      }
    }
  }
}

// Any step: kTogether of a lane's rows at a time go through all tokens of the sequence.
template <bool kFast>
__device__ __forceinline__ void run_any(const ScanArgs& a, const Work& w, const Entry& e, int head_dim) {
  constexpr int kAtOnce = !kFast ? 1 : kChunk * kTogether > kLanes ? kLanes / kTogether : kChunk;
  constexpr int kOutputs = kAtOnce * kTogether;  // sums that cross the lanes together, rows of a token side by side
  const int64_t first_row = static_cast<int64_t>(w.head) * head_dim + w.row0;
  const int begin = max(e.begin, 0), end = min(e.end, a.tokens);
  if (uniform(is_padding(a, e))) {
    clear_rows(a, w, kRows, begin, end, 1);
    return;
  }
  const int initial = initial_slot(a, e), final = final_slot(a, e, initial);
  const bool per_column = !kFast && (a.flags & kFlagPerColumnA);
  const float* column_A = a.A + static_cast<int64_t>(w.head) * kDState;
  const int64_t first_group = group_of(a, w.head);
#pragma unroll 1
  for (int first = 0; first < kRowTile; first += kTogether) {
    const Place at = place_of<kTogether>(w, head_dim, first);
    float s[kTogether][kSlice];
    float decays[kTogether];  // of stored integers, scales while no token was taken
    {
      const State* rows =
          static_cast<const State*>(a.state) + (initial * a.state_stride + (first_row + at.row) * kDState);
      Piece<State> stored[kTogether][kPieces];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const bool present = initial >= 0 && at.has(at.row + r);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          clear(stored[r][i]);
          if (present) {
            if constexpr (kFast) {
              load_piece<true>(stored[r][i], rows + r * kDState, column_of(at.lane, i), kDState);
            } else {
              load_elements(stored[r][i], rows + r * kDState, column_of(at.lane, i), kDState);
            }
          }
        }
        decays[r] = 1.f;
        if constexpr (kScaled) {
          decays[r] = present ? a.state_scale[initial * a.state_scale_stride + first_row + at.row + r] : 0.f;
        }
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
          for (int q = 0; q < kPieceQuads; ++q) put_quad(s[r] + i * kPiece + 4 * q, widen_quad(stored[r][i], q));
        }
      }
    }
    float d_of_lane = 0.f, decay_of_lane = 0.f;  // of the token that is this lane's among 32
#pragma unroll 1
    for (int t = begin; t < end; t += kAtOnce) {
      // One token's addresses are worked out anew for each: kept in registers they would cost more than they save.
      const int64_t row0 = kAtOnce == 1 ? opaque(first_row) : first_row;
      const int64_t group = kAtOnce == 1 ? opaque(first_group) : first_group;
      Token<kTogether> tokens[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load_token<kFast>(tokens[i], a, w, row0, group, at, min(t + i, end - 1));
      // The token and row that this lane stores y of.
      const int own = folded_index<kLanes, kOutputs>(at.lane);
      const int64_t own_token = t + own / kTogether, own_row = row0 + at.row + own % kTogether;
      const bool stores =
          at.lane % (kLanes / kOutputs) == 0 && own_token < end && at.has(at.row + own % kTogether);
      uint32_t own_x = 0u, own_z = 0u;
      if (stores && a.D) own_x = static_cast<const IoBits*>(a.x)[own_row + own_token * a.x_stride];
      if (stores && a.z) own_z = static_cast<const IoBits*>(a.z)[own_row + own_token * a.z_stride];
      const int turn = (t - begin) % 32;
      if (turn == 0) {
        const Head head = load_head(a, w.head, per_column);
        const int64_t own = min(t + static_cast<int>(threadIdx.x % 32), end - 1);
        const float dt = load_dt(a, a.dt, own * a.dt_stride + w.head);
        d_of_lane = step_size(dt, head.bias, a.flags, a.dt_min, a.dt_max);
        decay_of_lane = expf(d_of_lane * head.A);
      }
      const float D = a.D ? a.D[w.head] : 0.f;
      float sums[kShares][kOutputs] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i > 0 && uniform(t + i >= end)) break;
        const float d = __shfl_sync(kWholeWarp, d_of_lane, turn + i);
        const float decay = __shfl_sync(kWholeWarp, decay_of_lane, turn + i);
        if (per_column) {
          advance_rows<true>(s, tokens[i], d, decays, column_A, at.lane, sums, i * kTogether);
        } else {
          float of_rows[kTogether];
#pragma unroll
          for (int r = 0; r < kTogether; ++r) of_rows[r] = kScaled ? decay * decays[r] : decay;
          advance_rows<false>(s, tokens[i], d, of_rows, column_A, at.lane, sums, i * kTogether);
        }
#pragma unroll
        for (int r = 0; r < kTogether; ++r) decays[r] = 1.f;
        // The last token's checkpoint is stored with the final state.
        if (a.checkpoint_slots && uniform(t + i + 1 < end)) {
          const int64_t slot = a.checkpoint_slots[t + i];
          if (uniform(slot >= 0 && slot < a.slots)) store_rows<kFast>(a, s, slot, t + i - begin, row0, at);
        }
      }
      float out = sum_over_lanes(sums, at.lane);
      if (a.D) out = fmaf(D, to_f32(element_of(own_x, Io())), out);
      if (a.z) out *= silu(to_f32(element_of(own_z, Io())));
      if (stores) static_cast<Io*>(a.y)[own_row + own_token * a.y_stride] = from_f32<Io>(out);
    }
    if constexpr (kScaled) {
      // Of an empty sequence: its state is stored again as it was.
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int n = 0; n < kSlice; ++n) s[r][n] *= decays[r];
      }
    }
#pragma unroll 1
    for (int last = 0; last < 2; ++last) {
      int64_t slot = final;
      if (last == 0) slot = a.checkpoint_slots && begin < end ? a.checkpoint_slots[end - 1] : -1;
      if (uniform(slot >= 0 && slot < a.slots)) store_rows<kFast>(a, s, slot, end - begin - 1, first_row, at);
    }
  }
}

// The usual step: a sequence that has one token goes on from one slot to another, stores are rounded to nearest and
// everything takes whole vectors. Token s is then that of sequence s: it is asked for before the offsets are there, and
// the state as soon as its slot is known. What else the numbers say is judged when all that is on its way: a sequence
// that they send the long way stores nothing here, and this returns false.
__device__ __forceinline__ bool take_usual_step(const ScanArgs& a, const Work& w, const Entry& e, uint32_t t,
                                                int head_dim) {
  const uint32_t row0 = w.head * head_dim + w.row0;
  const Place at = place_of<kRowTile>(w, head_dim, 0);
  State* const in_slot =
      opaque(static_cast<State*>(a.state) + (row0 + at.row) * int64_t{kDState} + column_of(at.lane, 0));
  const Head head = load_head(a, w.head, false);
  Token<kRowTile> token;
  load_token<true>(token, a, w, row0, short_group_of(a, w.head), at, t);
  __syncwarp();  // what waits for the slot stays behind the loads that do not

  const uint32_t initial = e.read;
  const bool has_state = e.read >= 0 && in_pool(a, initial);
  const State* const from = opaque(in_slot + initial * a.state_stride);
  Piece<State> stored[kRowTile][kPieces];
  float scales[kRowTile];
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      clear(stored[r][i]);
      if (has_state && at.has(at.row + r) && column_of(at.lane, i) < kDState) {
        load_piece<true>(stored[r][i], from + r * kDState + i * kPiece * kLanes, 0, kDState);
      }
    }
  }
  if constexpr (kScaled) {
    const float* scale = a.state_scale + (initial * a.state_scale_stride + row0 + at.row);
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) scales[r] = has_state && at.has(at.row + r) ? scale[r] : 0.f;
  }
  const int64_t final = listed_write(a, e);
  const bool usual = has_state & (e.begin == static_cast<int>(t)) & (e.end == static_cast<int>(t) + 1) &
                     (e.resume != 0) & (e.read != a.pad_slot) & in_pool(a, final) & !a.checkpoint_slots &
                     !(kRounds && a.rounding_key);

  const float d = step_of(a, token.dt_f32, token.dt_io, head.bias);
  const float decay = expf(d * head.A);
  float4 b[kPieces][kPieceQuads], c[kPieces][kPieceQuads];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) b[i][q] = quad_of(token.B[i], q), c[i][q] = quad_of(token.C[i], q);
  }
  Output output = output_of(a, row0, t, at, token);
  output.at = opaque(usual ? output.at : -1), output.x = opaque_f32(output.x), output.gate = opaque_f32(output.gate);
  if constexpr (kScaled) __syncwarp();  // every lane has read the scales that one of them writes over
  State* const to = opaque(in_slot + final * a.state_stride);
  float sums[kShares][kRowTile];
  // A row is widened, moved on, narrowed and stored at once, so that few are wide.
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    float s[kSlice];
    const float dx = d * to_f32(token.x.at(r));
    const float decay1 = kScaled ? decay * scales[r] : decay;
    float pieces[kShares][kSummed] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float quads[kPieceQuads];
#pragma unroll
      for (int q = 0; q < kPieceQuads; ++q) {
        float* quad = s + i * kPiece + 4 * q;
        put_quad(quad, widen_quad(stored[r][i], q));
        quads[q] = advance(quad, make_float4(decay1, decay1, decay1, decay1), dx, b[i][q], c[i][q]);
      }
      share_quads(pieces, i, quads);
    }
#pragma unroll
    for (int q = 0; q < kShares; ++q) sums[q][r] = sum_quads(pieces[q]);
    RowScale scale;
    if constexpr (kScaled) scale = scale_of<kLanes>(s);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int q = 0; q < kPieceQuads; ++q) round_nearest(stored[r][i], q, s + i * kPiece + 4 * q, scale);
      if (usual && at.has(at.row + r) && column_of(at.lane, i) < kDState) {
        store_piece(to + r * kDState + i * kPiece * kLanes, 0, stored[r][i], kDState);
      }
    }
    scales[r] = scale.stored;
  }
  if constexpr (kScaled) {
    const float own = pick(scales, at.lane);
    const int row = at.row + at.lane;
    if (usual && at.lane < kRowTile && at.has(row)) a.state_scale[final * a.state_scale_stride + row0 + row] = own;
  }
  store_y(a, output, sum_over_lanes<kRowTile>(sums, at.lane), head.D);
  return uniform(usual);
}

extern "C" __global__ void __launch_bounds__(kThreads, 8)
ssm_update_n128_p64_l16_r16_w2_c1_bf16_sf32(const __grid_constant__ ScanArgs a) {
  constexpr uint32_t kVectors = kFlagVectorState | kFlagVectorX | kFlagVectorB | kFlagVectorC;
  const bool fast = (a.flags & (kVectors | kFlagPerColumnA)) == kVectors;
  const int head_dim = kHeadDim ? kHeadDim : a.head_dim;
  const uint32_t runs = (head_dim + kRows - 1u) / kRows;
  bool left = true;
  // As many tokens as sequences, if not fewer: the usual step.
  if (fast && is_short_work(a, blockIdx.x, runs) && 0 < a.tokens && a.tokens <= a.sequences) {
    const Work w = find_short_work(a, blockIdx.x, kRows, runs);
    const uint32_t entry = w.entry;
    if (entry >= static_cast<uint32_t>(a.sequences)) return;
    const uint32_t s = a.sequence_order ? sequence_of(a, entry) : entry;
    if (s < static_cast<uint32_t>(a.tokens)) {
      const Entry e = load_entry_of(a, s, unknown_zero());
      if (take_usual_step(a, w, e, s, head_dim)) {
        left = false;
        if (e.last >= a.tokens && blockIdx.x + int64_t{gridDim.x} >= work_items(a, kRows)) return;
      }
    }
  }
#pragma unroll 1
  for (int64_t item = blockIdx.x; item < work_items(a, kRows); item += gridDim.x, left = true) {
    const Work w = find_work(a, item, kRows);
    const Entry e = load_entry(a, w.entry);
    if (left && fast) run_any<true>(a, w, e, head_dim);
    if (left && !fast) run_any<false>(a, w, e, head_dim);
    clear_rows(a, w, kRows, first_unused_token(a) + w.entry, a.tokens, entries_of(a));
  }
}

// SPDX-License-Identifier: Apache-2.0
//
// ssm_update_n128_l16_r16_w2_c1_bf16_sbf16
//
// Decode: the selective state-space scan for the 1 to 8 tokens that a sequence has in a step, of Mamba-2 (one A a head)
// and Mamba-1 (one A a column). The state is read once and written once. For token t of a sequence, head h, group
// g = h / (heads / groups), row p, column n:
//
//   d      = dt[t,h] + dt_bias[h];  d = log1p(exp(d)) where d <= 20 (softplus);  d = clamp(d, dt_min, dt_max)
//   S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//   y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * silu(z[t,h,p])
//
// A lane owns 4 rows by 8 columns, the columns as 16-byte pieces l, l + 16, ... of 8: all of its state is asked for in
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

using Io = __nv_bfloat16;     // x, z, y, B, C
using State = __nv_bfloat16;  // the stored state; arithmetic is f32

constexpr int kDState = 128;    // columns of a row
constexpr int kHeadDim = 0;     // rows of a head, 0: known when it runs
constexpr int kLanes = 16;      // lanes that share a row
constexpr int kRows = 16;       // rows of a block
constexpr int kRowTile = 4;     // rows a lane owns
constexpr int kPieces = 1;      // pieces of a row that a lane owns
constexpr bool kAhead = false;  // whether a token is loaded while the one before is computed
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

// The numbers of one entry of a launch's sequence list, asked for together, so that they are waited for once. What they
// mean for the state and for the rest are questions of their own: the state's loads wait for no other answer.
struct Entry {
  int begin = 0;   // first token
  int end = 0;     // one past the last token
  int read = -1;   // slots as the lists say
  int write = -1;  // where there is no list, unused
  int resume = 0;  // not 0: the state goes on from the read slot
};

// NOTE: threadIdx.y is 0. It tells the compiler that the numbers may differ from lane to lane: in registers that a warp
// shares it would move each as soon as it is asked for, and wait there before it asks for the next.
__device__ __forceinline__ Entry load_entry(const ScanArgs& a, int64_t entry) {
  Entry e;
  int s = static_cast<int>(entry) + static_cast<int>(threadIdx.y);
  if (a.sequence_order) s = entry < a.sequences ? a.sequence_order[s] : -1;
  const bool there = s >= 0 && s < a.sequences;
  if (there) e.read = s, e.end = a.tokens;
  e.resume = there && a.state;
  if (there && a.read_slots) e.read = a.read_slots[s];
  if (there && a.state && a.resume) e.resume = a.resume[s];
  if (there && a.cu_seqlens) e.begin = a.cu_seqlens[s], e.end = a.cu_seqlens[s + 1];
  if (there && a.write_slots) e.write = a.write_slots[s];
  return e;
}

__device__ __forceinline__ bool in_pool(const ScanArgs& a, int slot) { return slot >= 0 && slot < a.slots; }

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

// Tokens from here on belong to no sequence: their rows of y become 0.
__device__ __forceinline__ int first_unused_token(const ScanArgs& a) {
  if (!a.cu_seqlens) return a.tokens;
  return min(max(a.cu_seqlens[a.sequences], 0), a.tokens);
}

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

// Where an item of work lies, by two divisions that do not wait for each other: `find_work` has one after the other,
// and of integers, which a launch of microseconds feels. With head_dim known when this is compiled one is a shift.
__device__ __forceinline__ Work find_work_at_once(const ScanArgs& a, int64_t item, int rows, int head_dim) {
  const uint32_t runs = (head_dim + rows - 1u) / rows;
  const int64_t of_entry = static_cast<int64_t>(a.heads) * runs;
  if (item >= kShort || of_entry >= kShort) return find_work(a, item, rows);
  const uint32_t short_item = static_cast<uint32_t>(item);
  const uint32_t entry = divide_short(short_item, static_cast<uint32_t>(of_entry));
  const uint32_t row_of_heads = kHeadDim ? short_item / runs : divide_short(short_item, runs);
  Work w;
  w.entry = entry;
  w.head = static_cast<int>(row_of_heads - entry * a.heads);
  w.row0 = static_cast<int>(short_item - row_of_heads * runs) * rows;
  return w;
}

// The group of a head, h / (heads / groups) in one division.
__device__ __forceinline__ int64_t group_of(const ScanArgs& a, int head) {
  const int64_t scaled = static_cast<int64_t>(head) * a.groups;
  if (scaled >= kShort || a.heads >= kShort) return scaled / a.heads;
  return divide_short(static_cast<uint32_t>(scaled), static_cast<uint32_t>(a.heads));
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

constexpr int kSlice = kPieces * kPiece;   // columns a lane owns of a row
constexpr bool kScaled = sizeof(State) == 1;  // 8-bit states have a scale a row
constexpr bool kRounds = sizeof(State) < 4;   // stores lose bits
constexpr bool kWholeRuns = kHeadDim > 0 && kHeadDim % kRows == 0;  // no run of rows is cut short
// In-lane sums are halved as if there were a power of two of pieces, so that zeros are added whatever the lanes.
constexpr int kSummed = kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;

__device__ __forceinline__ int column_of(int lane, int piece) { return kPiece * (lane + kLanes * piece); }

// What a lane reads of one token: its columns of B and C, which serve all its rows, x of its rows, x and z of the row
// whose y it stores, and dt.
struct Token {
  Piece<Io> B[kPieces], C[kPieces];
  Io x[kRowTile];
  Io own_x, own_z;
  float dt;
};

// Where a lane works: its first row in the run, the row that it stores y of, and which of them are there.
struct Place {
  int lane, row, own, valid_rows;
  bool stores_y;
  __device__ __forceinline__ bool has(int r) const { return kWholeRuns || r < valid_rows; }
};

// The pointers of a lane's group, rows and head at token 0.
struct Source {
  const Io *B, *C, *x, *z;
  const void* dt;
  int head;
};

// kFast: state, B, C and x take accesses of 16 bytes (or all that a lane needs of them), and A is one a head.
template <bool kFast>
__device__ __forceinline__ void load_token(Token& to, const ScanArgs& a, const Source& from, const Place& at,
                                           int64_t t) {
  to.dt = load_dt(a, from.dt, t * a.dt_stride + from.head);
  const Io* x = from.x + t * a.x_stride;
  if constexpr (kFast) {
    load_run<kRowTile>(to.x, x, at.row, kWholeRuns ? kRows : at.valid_rows);
  } else {
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) to.x[r] = at.has(at.row + r) ? x[at.row + r] : from_f32<Io>(0.f);
  }
  const bool owns = at.has(at.own);
  to.own_x = owns ? x[at.own] : from_f32<Io>(0.f);
  to.own_z = owns && a.z ? from.z[t * a.z_stride + at.own] : from_f32<Io>(0.f);
  const Io *B = from.B + t * a.B_stride, *C = from.C + t * a.C_stride;
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
}

// One token's step of a lane's rows; returns the row's sum of S * C that this lane stores, whole on every lane of
// its share. Sums over columns go by column bits from high to low: pieces of a lane, lanes, quads of a piece.
template <bool kPerColumn>
__device__ __forceinline__ float advance_rows(float (&s)[kRowTile][kSlice], const Token& token, float d, float decay1,
                                              const float* column_A, int lane) {
  float dx[kRowTile];
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) dx[r] = d * to_f32(token.x[r]);
  float sums[kPieceQuads][kRowTile][kSummed] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int q = 0; q < kPieceQuads; ++q) {
      const float4 b = quad_of(token.B[i], q), c = quad_of(token.C[i], q);
      float4 decay = make_float4(decay1, decay1, decay1, decay1);
      if constexpr (kPerColumn) {
        const int n = column_of(lane, i) + 4 * q;
        decay.x = n + 0 < kDState ? expf(d * column_A[n + 0]) : 1.f;
        decay.y = n + 1 < kDState ? expf(d * column_A[n + 1]) : 1.f;
        decay.z = n + 2 < kDState ? expf(d * column_A[n + 2]) : 1.f;
        decay.w = n + 3 < kDState ? expf(d * column_A[n + 3]) : 1.f;
      }
#pragma unroll
      for (int r = 0; r < kRowTile; ++r) sums[q][r][i] = advance(s[r] + i * kPiece + 4 * q, decay, dx[r], b, c);
    }
  }
  float quads[kPieceQuads];
#pragma unroll
  for (int q = 0; q < kPieceQuads; ++q) {
    float rows[kRowTile];
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) rows[r] = sum_quads(sums[q][r]);
    fold_lanes<kLanes, kRowTile>(rows, lane);
    quads[q] = sum_lanes(rows[0], kLanes / kRowTile);
  }
  return sum_quads(quads);
}

// Stores a lane's rows to a slot. `row0` is the run's first row among heads * head_dim.
template <bool kFast>
__device__ __forceinline__ void store_rows(const ScanArgs& a, const float (&s)[kRowTile][kSlice], int64_t slot,
                                           int token, int64_t row0, const Place& at, const Rounding& rounding) {
  State* rows = static_cast<State*>(a.state) + slot * a.state_stride + (row0 + at.row) * kDState;
  if constexpr (kScaled) __syncwarp();  // every lane has read the scales that one of them writes over
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
    RowScale scale;
    if constexpr (kScaled) {
      uint32_t largest = 0u;
#pragma unroll
      for (int n = 0; n < kSlice; ++n) largest = max(largest, __float_as_uint(s[r][n]) & 0x7fffffffu);
#pragma unroll
      for (int bit = kLanes / 2; bit >= 1; bit /= 2) {
        largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, bit));
      }
      scale = row_scale(largest);
    }
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
          uint4 random = make_uint4(0u, 0u, 0u, 0u);
          if (kRounds && rounding.stochastic) {
            const uint32_t row = static_cast<uint32_t>(row0 + at.row + r);
            random = draw4(rounding, row, (kDState + 3) / 4, n / 4 + q, slot, token);
          }
          round_quad(piece, q, s[r] + i * kPiece + 4 * q, random, kRounds && rounding.stochastic, scale);
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

template <bool kFast>
__device__ __forceinline__ void run_item(const ScanArgs& a, const Work& w) {
  const Entry e = load_entry(a, w.entry);
  // What follows waits for none of these numbers, so that the state's addresses and the token's are ready when they
  // arrive; only the slot and the token are added then.
  const int head_dim = kHeadDim ? kHeadDim : a.head_dim;
  const int64_t row0 = static_cast<int64_t>(w.head) * head_dim + w.row0;
  Place at;
  at.lane = threadIdx.x % kLanes;
  at.row = threadIdx.x / kLanes * kRowTile;
  at.own = at.row + folded_index<kLanes, kRowTile>(at.lane);
  at.stores_y = at.lane % (kLanes / kRowTile) == 0;
  at.valid_rows = min(kRows, head_dim - w.row0);
  const int64_t in_slot = opaque((row0 + at.row) * kDState + kPiece * at.lane);
  const int64_t group = group_of(a, w.head);
  const Source source{static_cast<const Io*>(a.B) + group * kDState,
                      static_cast<const Io*>(a.C) + group * kDState,
                      static_cast<const Io*>(a.x) + row0,
                      static_cast<const Io*>(a.z) + row0,
                      a.dt,
                      w.head};

  // All of the state is asked for before anything is waited for.
  const int initial = initial_slot(a, e);
  Piece<State> stored[kRowTile][kPieces];
  float scales[kRowTile];
  {
    const State* rows = static_cast<const State*>(a.state) + (initial * a.state_stride + in_slot);
#pragma unroll
    for (int r = 0; r < kRowTile; ++r) {
      const bool present = initial >= 0 && at.has(at.row + r);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        clear(stored[r][i]);
        if (present) {
          const State* from = rows + r * kDState - kPiece * at.lane;
          if constexpr (kFast) {
            load_piece<true>(stored[r][i], from, column_of(at.lane, i), kDState);
          } else {
            load_elements(stored[r][i], from, column_of(at.lane, i), kDState);
          }
        }
      }
      if constexpr (kScaled) {
        scales[r] = present ? a.state_scale[initial * a.state_scale_stride + row0 + at.row + r] : 0.f;
      }
    }
  }

  const int begin = max(e.begin, 0), end = min(e.end, a.tokens);
  if (uniform(is_padding(a, e))) {
    clear_rows(a, w, kRows, begin, end, 1);
    clear_rows(a, w, kRows, first_unused_token(a) + w.entry, a.tokens, entries_of(a));
    return;
  }
  const int final = final_slot(a, e, initial);
  // The first token and what all tokens share.
  Token token{};
  if (uniform(begin < end)) load_token<kFast>(token, a, source, at, begin);
  const int head = opaque(w.head);
  const bool per_column = !kFast && (a.flags & kFlagPerColumnA);
  const float A = per_column ? 0.f : a.A[head];
  const float bias = a.dt_bias ? a.dt_bias[head] : 0.f;
  const float D = a.D ? a.D[head] : 0.f;
  const int last_offset = a.cu_seqlens ? a.cu_seqlens[a.sequences] : a.tokens;  // needed last, waits with the others
  Rounding rounding;
  if constexpr (kRounds) rounding = find_rounding(a.rounding_key);

  float s[kRowTile][kSlice];
#pragma unroll
  for (int r = 0; r < kRowTile; ++r) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int k = 0; k < kPieceQuads; ++k) {
        const float4 v = quad_of(stored[r][i], k);
        float* to = s[r] + i * kPiece + 4 * k;
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        if constexpr (kScaled) to[0] *= scales[r], to[1] *= scales[r], to[2] *= scales[r], to[3] *= scales[r];
      }
    }
  }

  Io* y = static_cast<Io*>(a.y) + row0 + at.own;
  const float* column_A = a.A + static_cast<int64_t>(head) * kDState;
#pragma unroll 1
  for (int t = begin; uniform(t < end); ++t) {
    Token next = token;
    if (kAhead && uniform(t + 1 < end)) load_token<kFast>(next, a, source, at, t + 1);
    const float d = step_size(token.dt, bias, a.flags, a.dt_min, a.dt_max);
    float out;
    if (per_column) {
      out = advance_rows<true>(s, token, d, 0.f, column_A, at.lane);
    } else {
      out = advance_rows<false>(s, token, d, expf(d * A), column_A, at.lane);
    }
    if (at.stores_y && at.has(at.own)) {
      if (a.D) out = fmaf(D, to_f32(token.own_x), out);
      if (a.z) out *= silu(to_f32(token.own_z));
      y[t * a.y_stride] = from_f32<Io>(out);
    }
    const int64_t slot = a.checkpoint_slots ? a.checkpoint_slots[t] : -1;
    if (uniform(slot >= 0 && slot < a.slots)) store_rows<kFast>(a, s, slot, t - begin, row0, at, rounding);
    if (!kAhead && uniform(t + 1 < end)) load_token<kFast>(next, a, source, at, t + 1);
    token = next;
  }
  if (uniform(final >= 0)) store_rows<kFast>(a, s, final, end - begin - 1, row0, at, rounding);
  const int unused = min(max(last_offset, 0), a.tokens);
  clear_rows(a, w, kRows, unused + w.entry, a.tokens, entries_of(a));
}

extern "C" __global__ void __launch_bounds__(kThreads, 8)
ssm_update_n128_l16_r16_w2_c1_bf16_sbf16(const __grid_constant__ ScanArgs a) {
  constexpr uint32_t kVectors = kFlagVectorState | kFlagVectorX | kFlagVectorB | kFlagVectorC;
  const bool fast = (a.flags & (kVectors | kFlagPerColumnA)) == kVectors;
#pragma unroll 1
  for (int64_t item = blockIdx.x;;) {
    const Work w = find_work_at_once(a, item, kRows, kHeadDim ? kHeadDim : a.head_dim);
    if (w.entry >= entries_of(a)) return;
    if (fast) {
      run_item<true>(a, w);
    } else {
      run_item<false>(a, w);
    }
    // Counted behind the work, not before it: few launches have a second item for a block.
    item += gridDim.x;
    if (item >= opaque(entries_of(a)) * a.heads * ((a.head_dim + kRows - 1) / kRows)) return;
  }
}

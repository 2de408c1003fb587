// The CUDA built-ins that an emitted kernel uses, for g++. Force-included before the unchanged .cu text.
//
// Every function named emu_* is defined in runtime.cpp. The ones that wrappers in templates/ssm/*.cuh call from their
// `#ifdef SSM_EMULATOR` branch are documented here, under "asynchronous copies", "flags between blocks" and "mma".
#pragma once
#define SSM_EMULATOR 1

#include <cstddef>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __shared__
#undef __device__
#undef __host__
#undef __global__
#undef __constant__
#undef __grid_constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __align__
// A section is legal on the one `extern __shared__` array and a compile error on a local `__shared__` variable, which
// would otherwise silently become private to each thread.
#define __shared__ __attribute__((section(".bss.ssm_shared")))
#define __device__
#define __host__
#define __global__ __attribute__((visibility("default"), used))
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

// g++ expands block copies inline without telling the instrumentation: only the sizes that it turns into one load and
// one store may stay its own.
extern "C" {
void* emu_memcpy(void*, const void*, std::size_t);
void* emu_memmove(void*, const void*, std::size_t);
void* emu_memset(void*, int, std::size_t);
#define EMU_REPLACE extern inline __attribute__((gnu_inline, always_inline, artificial))
EMU_REPLACE void* memcpy(void* to, const void* from, std::size_t n) noexcept {
  if (__builtin_constant_p(n) && (n == 1 || n == 2 || n == 4 || n == 8 || n == 16)) return __builtin_memcpy(to, from, n);
  return emu_memcpy(to, from, n);
}
EMU_REPLACE void* memmove(void* to, const void* from, std::size_t n) noexcept { return emu_memmove(to, from, n); }
EMU_REPLACE void* memset(void* to, int value, std::size_t n) noexcept { return emu_memset(to, value, n); }
#undef EMU_REPLACE
}

// ---------------------------------------------------------------------------------------------------- indices

struct EmuIndex {
  unsigned x, y, z;
};
// `const` holds: within one thread (one fiber) the answers never change, so g++ may ask once per function.
extern "C" {
EmuIndex emu_thread_index() __attribute__((const));
EmuIndex emu_block_index() __attribute__((const));
EmuIndex emu_block_dim() __attribute__((const));
EmuIndex emu_grid_dim() __attribute__((const));
unsigned emu_lane() __attribute__((const));
}
#define threadIdx (emu_thread_index())
#define blockIdx (emu_block_index())
#define blockDim (emu_block_dim())
#define gridDim (emu_grid_dim())
inline constexpr int warpSize = 32;

// ---------------------------------------------------------------------------------------------------- barriers

extern "C" {
enum EmuReduce { kEmuNone, kEmuOr, kEmuAnd, kEmuCount };
int emu_barrier(int reduce, int predicate, int line);
// barrier.sync.aligned (`wait`) and barrier.arrive.aligned of barrier 0 to 15, where 0 is that of __syncthreads and
// cannot be used beside it: a warp comes as a whole, and a phase is over when warps of `threads` threads have come. It orders memory as a __syncthreads of those warps would: what a warp
// did before it came is seen by the warps that wait.
void emu_named_barrier(int number, int threads, bool wait, int line = __builtin_LINE());
// One warp-wide operation. `source` is the lane a shuffle reads. Returns this lane's result.
enum EmuWarpKind {
  kEmuSyncwarp, kEmuShfl, kEmuShflUp, kEmuShflDown, kEmuShflXor, kEmuBallot, kEmuAny, kEmuAll, kEmuMatchAny,
  kEmuAddU, kEmuMinU, kEmuMaxU, kEmuMinS, kEmuMaxS, kEmuAnd_, kEmuOr_, kEmuXor_,
  kEmuMmaBf16, kEmuMmaF16, kEmuMmaTf32, kEmuLoadMatrices, kEmuLoadMatricesTransposed, kEmuNamedBarrier
};
std::uint64_t emu_warp(int kind, unsigned mask, std::uint64_t value, unsigned source, int line);
unsigned emu_active_mask();
void emu_fence(int line);
void emu_yield();  // in a spin loop: let other threads and blocks run
[[noreturn]] void emu_trap(int line);
}

inline void __syncthreads(int line = __builtin_LINE()) { emu_barrier(kEmuNone, 0, line); }
inline int __syncthreads_or(int p, int line = __builtin_LINE()) { return emu_barrier(kEmuOr, p, line); }
inline int __syncthreads_and(int p, int line = __builtin_LINE()) { return emu_barrier(kEmuAnd, p, line); }
inline int __syncthreads_count(int p, int line = __builtin_LINE()) { return emu_barrier(kEmuCount, p, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  emu_warp(kEmuSyncwarp, mask, 0, emu_lane(), line);
}
inline void __threadfence(int line = __builtin_LINE()) { emu_fence(line); }
inline void __threadfence_system(int line = __builtin_LINE()) { emu_fence(line); }
inline void __threadfence_block() {}  // orders nothing that a barrier does not order here
inline void __nanosleep(unsigned) { emu_yield(); }
inline void __trap(int line = __builtin_LINE()) { emu_trap(line); }

// ---------------------------------------------------------------------------------------------------- warps

template <class T>
inline T emu_shuffle(int kind, unsigned mask, T value, unsigned source, int line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "shuffles move up to 8 bytes");
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = emu_warp(kind, mask, bits, source, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = emu_lane(), base = lane & ~(unsigned)(width - 1);
  return emu_shuffle(kEmuShfl, mask, value, base + ((unsigned)source & (unsigned)(width - 1)), line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = emu_lane(), within = lane & (unsigned)(width - 1);
  return emu_shuffle(kEmuShflUp, mask, value, within >= delta ? lane - delta : lane, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = emu_lane(), within = lane & (unsigned)(width - 1);
  return emu_shuffle(kEmuShflDown, mask, value, within + delta < (unsigned)width ? lane + delta : lane, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
  // As the hardware: a source in a later segment of `width` lanes is out of range (own value), an earlier one is read.
  const unsigned lane = emu_lane(), source = lane ^ (unsigned)bits, last = lane | (unsigned)(width - 1);
  return emu_shuffle(kEmuShflXor, mask, value, source <= last ? source : lane, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, int line = __builtin_LINE()) {
  return (unsigned)emu_warp(kEmuBallot, mask, p != 0, emu_lane(), line);
}
inline int __any_sync(unsigned mask, int p, int line = __builtin_LINE()) {
  return (int)emu_warp(kEmuAny, mask, p != 0, emu_lane(), line);
}
inline int __all_sync(unsigned mask, int p, int line = __builtin_LINE()) {
  return (int)emu_warp(kEmuAll, mask, p != 0, emu_lane(), line);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return (unsigned)emu_warp(kEmuMatchAny, mask, bits, emu_lane(), line);
}
// The lanes that have not exited. CUDA promises less; a kernel that syncs on a divergent answer deadlocks here.
inline unsigned __activemask() { return emu_active_mask(); }
#define EMU_REDUCE(name, type, kind)                                                                    \
  inline type name(unsigned mask, type value, int line = __builtin_LINE()) {                            \
    return (type)emu_warp(kind, mask, (std::uint64_t)(std::int64_t)value, emu_lane(), line);            \
  }
EMU_REDUCE(__reduce_add_sync, unsigned, kEmuAddU)
EMU_REDUCE(__reduce_add_sync, int, kEmuAddU)
EMU_REDUCE(__reduce_min_sync, unsigned, kEmuMinU)
EMU_REDUCE(__reduce_min_sync, int, kEmuMinS)
EMU_REDUCE(__reduce_max_sync, unsigned, kEmuMaxU)
EMU_REDUCE(__reduce_max_sync, int, kEmuMaxS)
EMU_REDUCE(__reduce_and_sync, unsigned, kEmuAnd_)
EMU_REDUCE(__reduce_or_sync, unsigned, kEmuOr_)
EMU_REDUCE(__reduce_xor_sync, unsigned, kEmuXor_)
#undef EMU_REDUCE

// ---------------------------------------------------------------------------------------------------- atomics
// Relaxed, as CUDA's. An atomic that leaves memory unchanged also yields, so that lock and flag loops make progress.

extern "C" {
std::uint64_t emu_atomic_load(void* address, unsigned bytes);
void emu_atomic_store(void* address, unsigned bytes, std::uint64_t value);
}
template <class T, class F>
inline T emu_atomic(T* address, F next) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics are 32 or 64 bits wide");
  const std::uint64_t bits = emu_atomic_load(address, sizeof(T));
  T old;
  __builtin_memcpy(&old, &bits, sizeof(T));
  const T now = next(old);
  std::uint64_t stored = 0;
  __builtin_memcpy(&stored, &now, sizeof(T));
  emu_atomic_store(address, sizeof(T), stored);
  return old;
}
#define EMU_ATOMIC(name, expression)                                                  \
  template <class T>                                                                  \
  inline T name(T* address, std::type_identity_t<T> v) {                              \
    return emu_atomic(address, [v](T old) -> T { return (T)(expression); });          \
  }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicExch, ((void)old, v))
EMU_ATOMIC(atomicMax, old < v ? v : old)
EMU_ATOMIC(atomicMin, v < old ? v : old)
EMU_ATOMIC(atomicAnd, old & v)
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
EMU_ATOMIC(atomicDec, (old == 0 || old > v) ? v : old - 1)
#undef EMU_ATOMIC
template <class T>
inline T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return emu_atomic(address, [=](T old) -> T { return old == expected ? value : old; });
}

// ------------------------------------------------------------------------------------ asynchronous copies (cp.async)
// The data lands when the issuing thread waits, never earlier. Until then any access to the destination is an error, as
// is a change of the source. After the wait the bytes count as written by the issuing thread: others need a barrier.

extern "C" {
// Copies `bytes` (4, 8 or 16; both addresses aligned to it) from a global buffer to shared memory.
void emu_cp_async(void* shared_destination, const void* global_source, int bytes);
// As above; only the first `source_bytes` (0 to bytes) are read, the rest of the destination becomes zero.
void emu_cp_async_zfill(void* shared_destination, const void* global_source, int bytes, int source_bytes);
void emu_cp_async_commit();           // closes this thread's current group, which may be empty
void emu_cp_async_wait_group(int n);  // waits until at most n of this thread's committed groups are in flight
void emu_cp_async_wait_all();         // waits for every copy of this thread, committed or not
}

// ------------------------------------------------------------------------------------------- flags between blocks

extern "C" {
// ld.acquire.gpu / st.release.gpu on a 32-bit word. A release publishes all that its thread wrote, and all that the
// thread was ordered after (its block's accesses before the last barrier, what it had itself acquired).
unsigned emu_ld_acquire(const unsigned* address);
void emu_st_release(unsigned* address, unsigned value);
}

// ------------------------------------------------------------------------------------------- cached and streaming access

#define EMU_LOAD(name) \
  template <class T>   \
  __forceinline__ T name(const T* p) { return *p; }
EMU_LOAD(__ldg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
#undef EMU_LOAD
#define EMU_STORE(name) \
  template <class T>    \
  __forceinline__ void name(T* p, const std::type_identity_t<T>& v) { *p = v; }
EMU_STORE(__stcs)
EMU_STORE(__stcg)
EMU_STORE(__stwb)
EMU_STORE(__stwt)
#undef EMU_STORE

// ---------------------------------------------------------------------------------------------------- arithmetic

template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return (T)a != (T)a ? (T)b : (T)b < (T)a ? (T)b : (T)a;
  else return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return (T)a != (T)a ? (T)b : (T)a < (T)b ? (T)b : (T)a;
  else return (T)a < (T)b ? (T)b : (T)a;
}
inline unsigned umin(unsigned a, unsigned b) { return b < a ? b : a; }
inline unsigned umax(unsigned a, unsigned b) { return a < b ? b : a; }

inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline long long __double_as_longlong(double v) { return std::bit_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return std::bit_cast<double>(v); }

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((std::uint64_t)a * b) >> 32); }
inline int __mulhi(int a, int b) { return (int)(((std::int64_t)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline int __popc(unsigned v) { return std::popcount(v); }
inline int __popcll(unsigned long long v) { return std::popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return std::countl_zero((unsigned)v); }
inline int __clzll(long long v) { return std::countl_zero((unsigned long long)v); }
inline unsigned __brev(unsigned v) {
  v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
  v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
  v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(v);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t bytes = (std::uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15u;
    unsigned byte = (unsigned)(bytes >> (8 * (s & 7u))) & 255u;
    if (s & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((std::uint64_t)high << 32 | low) << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((std::uint64_t)high << 32 | low) >> (shift & 31u));
}

inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frsqrt_rn(float v) { return (float)(1.0 / sqrt((double)v)); }
inline float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
inline int __float2int_rn(float v) { return (int)rintf(v); }
inline int __float2int_rz(float v) { return (int)v; }
inline unsigned __float2uint_rn(float v) { return (unsigned)rintf(v); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }
// Macros, for glibc declares functions of these names. Fast approximations are exact here: compare with a tolerance.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)

// ---------------------------------------------------------------------------------------------------- mma
// Tensor-core instructions, matched like a shuffle of all 32 lanes: the last lane to arrive computes for the warp.

extern "C" {
// d += a b of one warp, kind kEmuMmaBf16 or kEmuMmaF16 (m16n8k16) or kEmuMmaTf32 (m16n8k8; the 13 low bits of a and b are
// dropped). Products and sums are taken in double precision and rounded to f32 once. A tensor core adds the same exact
// products in an order and with a truncation of its own: it differs by at most 2^-20 (|d| + sum of |a b|).
void emu_mma(int kind, float* d, const unsigned* a, unsigned b0, unsigned b1, int line = __builtin_LINE());
// ldmatrix.x4, kind kEmuLoadMatrices or kEmuLoadMatricesTransposed. Lane l gives row l % 8 of matrix l / 8; as in the PTX
// ISA lanes 4 r to 4 r + 3 read row r of each matrix, so a lane's read of a row that another lane wrote needs an order.
void emu_load_matrices(int kind, unsigned* result, const void* row, int line = __builtin_LINE());
}

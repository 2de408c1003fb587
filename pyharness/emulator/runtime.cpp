// The emulator's runtime: memory hooks, threads as fibers, barriers, warp operations, asynchronous copies, and the
// C interface that pyharness.emulator loads. One copy is linked into the shared object of each kernel, hidden symbols
// only, so that loaded kernels share nothing; one run at a time uses a copy (emu_open locks it, emu_close frees it).
//
// Threads run one at a time and switch only inside these functions, so nothing here needs locks. memory.h says what is
// checked and what the limits are; cuda_emulator.h documents the functions that kernels call.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

#include <dlfcn.h>
#include <link.h>

#include "fiber.h"
#include "memory.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define HOOK extern "C" __attribute__((visibility("hidden")))
#define PC __builtin_return_address(0)

// What a kernel declares as `extern __shared__ T shared_memory[]`; resident blocks take turns in it.
__attribute__((section(".bss.ssm_shared"), aligned(4096))) unsigned char shared_memory[emu::kSharedMax + emu::kSharedGuard];

namespace emu {

Hot hot;

namespace {

struct Index {
  u32 x, y, z;
};

struct Block;

struct Copy {
  uptr destination, source;
  u32 bytes, source_bytes, group;
  void* pc;
  u8 snapshot[16];  // the source when the copy was issued
};

enum class State : u8 { kReady, kYielded, kBarrier, kNamed, kWarp, kDone };

struct Fiber {
  void* stack_pointer;
  char* stack;
  Block* block;
  Index index;
  u32 thread, warp, lane;
  State state;
  int line, kind;
  u32 mask, source;
  u64 value, result;
  std::vector<Copy> copies;
  u32 groups;
  Clock acquired, pending;  // pending: seen by relaxed accesses, in force after the next fence
  Clock fenced;             // what the last fence publishes through later relaxed writes
};

struct Warp {
  u32 exists, waiting, at_barrier, done;  // lane masks
  u32 counter, clock[32], known[32][32];
  u32 heard[32];  // by warp: its accesses with a clock below this are ordered before this warp's next ones
};

struct NamedBarrier {
  u32 threads, come, warps, phase;  // threads that a phase takes and that have come; mask of warps; phases that are over
  u32 waiting;                      // mask of warps that wait
  u32 heard[32];                    // what those that have come tell
  int line;
};

struct Block {
  u32 id, epoch, first;
  Index index;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Fiber*> ready, yielded;
  u32 arrived, exited;
  int barrier_line, votes, barrier_result;
  NamedBarrier named[16];
  std::vector<u8> shared;  // contents while another block is entered
  Cell *cells, *byte_cells;
  u64* stamps;  // [warps][words of shared memory]
  Clock acquired;
};

struct Region {
  u64 low, bytes;  // offset in the arena
};

struct Mapping {
  char* low = nullptr;
  u64 bytes = 0;
  bool reserve(u64 size) {
    release();
    if (size == 0) return true;
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    low = static_cast<char*>(p);
    bytes = size;
    return true;
  }
  void release() {
    if (low) munmap(low, bytes);
    low = nullptr;
    bytes = 0;
  }
};

}  // namespace

struct Finding {  // mirrored in pyharness/emulator/binding.py
  char kind[32];
  char text[256];
  u64 address, pc;  // pc: offset in the shared object, 0 if none
  std::int64_t region;  // -1: none, -2: shared memory
  std::int64_t offset;  // in the region or in shared memory
  u32 bytes;
  std::int32_t line;
  u32 block[3], thread[3];
  std::int64_t other_thread;  // linear, -1: none
  u32 other_block[3];
};

namespace {

constexpr std::size_t kMaxFindings = 64;
constexpr u64 kMaxReports = 5000;                        // repeats included; the launch ends there
constexpr std::int64_t kBudget = std::int64_t{1} << 28;  // accesses of one thread between two switches
constexpr int kIdleRounds = 256;                         // rounds of yields in which nothing changed

struct Machine {
  Fiber* current = nullptr;
  Block* entered = nullptr;
  void* scheduler = nullptr;  // its stack pointer while a fiber runs
  bool aborted = false;
  Index block_dim{}, grid_dim{};
  u32 threads = 0, shared_bytes = 0, last_epoch = 0;
  u64 random = 0, events = 0;
  u64 count_threads = 0, count_switches = 0, count_accesses = 0;
  void (*entry)() = nullptr;
  std::vector<u8> arguments;
  std::vector<std::unique_ptr<Block>> slots;
  std::vector<Region> regions;
  Mapping arena, state, cells, byte_cells, stacks, shared_cells, stamps;
  std::unordered_map<uptr, Clock> published;  // by address of a flag
  std::vector<Finding> findings;
  u64 findings_total = 0;
  std::vector<std::pair<uptr, uptr>> own_segments;
};

std::mutex in_use;
Machine* machine = nullptr;

u64 next_random() {  // splitmix64
  u64 z = machine->random += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

u32 below(u32 n) { return static_cast<u32>((next_random() >> 32) * n >> 32); }

void shuffle(std::vector<Fiber*>& v) {
  for (std::size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[below(static_cast<u32>(i))]);
}

Index unlinear(u64 i, Index dim) {
  return {static_cast<u32>(i % dim.x), static_cast<u32>(i / dim.x % dim.y), static_cast<u32>(i / dim.x / dim.y)};
}

// ------------------------------------------------------------------------------------------------ reports

constexpr u32 kNobody = ~0u;

[[noreturn]] void abandon();

// Adds a finding about the running thread, unless the same place already has one of this kind.
EMU_SLOW void report(const char* kind, uptr address, u32 bytes, void* pc, int line, u32 other_block, u32 other_thread,
                     const char* format, ...) {
  Machine& m = *machine;
  if (++m.findings_total > kMaxReports && m.current && !m.aborted) abandon();
  if (m.findings.size() >= kMaxFindings) return;
  Finding f{};
  std::snprintf(f.kind, sizeof f.kind, "%s", kind);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(f.text, sizeof f.text, format, arguments);
  va_end(arguments);
  f.address = address;
  f.bytes = bytes;
  f.line = line;
  f.region = -1;
  f.other_thread = -1;
  if (pc) {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(&emu_switch), &info))
      f.pc = reinterpret_cast<uptr>(pc) - reinterpret_cast<uptr>(info.dli_fbase);
  }
  const uptr shared = reinterpret_cast<uptr>(shared_memory);
  if (address >= shared - kSharedGuard && address < shared + kSharedMax + kSharedGuard) {
    f.region = -2;
    f.offset = static_cast<std::int64_t>(address - shared);
  } else if (address - hot.arena_low < hot.arena_bytes) {
    const auto offset = static_cast<std::int64_t>(address - hot.arena_low);
    std::int64_t nearest = -1;
    for (std::size_t i = 0; i < m.regions.size(); ++i) {
      const auto low = static_cast<std::int64_t>(m.regions[i].low);
      const auto high = low + static_cast<std::int64_t>(m.regions[i].bytes);
      const std::int64_t distance = offset < low ? low - offset : offset >= high ? offset - high + 1 : 0;
      if (nearest < 0 || distance < nearest) {
        nearest = distance;
        f.region = static_cast<std::int64_t>(i);
        f.offset = offset - low;
      }
    }
  }
  if (const Fiber* me = m.current) {
    f.block[0] = me->block->index.x, f.block[1] = me->block->index.y, f.block[2] = me->block->index.z;
    f.thread[0] = me->index.x, f.thread[1] = me->index.y, f.thread[2] = me->index.z;
  }
  if (other_thread != kNobody) {
    const Index b = unlinear(other_block, m.grid_dim);
    f.other_thread = other_thread;
    f.other_block[0] = b.x, f.other_block[1] = b.y, f.other_block[2] = b.z;
  }
  for (const Finding& g : m.findings)
    if (g.pc == f.pc && g.line == f.line && g.region == f.region && !std::strcmp(g.kind, f.kind)) return;
  m.findings.push_back(f);
}

void switch_out() {
  Fiber* me = machine->current;
  emu_switch(&me->stack_pointer, machine->scheduler);
}

// Ends the launch from inside a thread: after a wild access or a hopeless barrier nothing further can be trusted.
[[noreturn]] void abandon() {
  machine->aborted = true;
  for (;;) switch_out();
}

// ------------------------------------------------------------------------------------------------ order

void load_clock() {
  const Fiber& me = *machine->current;
  const u32 clock = me.block->warps[me.warp].clock[me.lane];
  hot.w_who = me.thread << kClockBits | clock;
  hot.r_who = me.warp << kClockBits | clock;
  hot.stamp = (u64{me.block->epoch} << kStampLaneBits | me.lane) << kClockBits | clock;
}

u32 tick(Warp& w) {
  if (++w.counter > kClockMask) {
    report("limit", 0, 0, nullptr, 0, 0, kNobody, "more than 2^20 warp synchronisations between two __syncthreads");
    abandon();
  }
  return w.counter;
}

// What the running thread would publish now; its later accesses are not part of it.
Clock publish() {
  Fiber& me = *machine->current;
  Warp& w = me.block->warps[me.warp];
  Clock out = me.block->acquired;
  merge(out, me.acquired);
  Release r{me.block->epoch, me.warp, {}};
  for (int i = 0; i < 32; ++i) r.known[i] = w.known[me.lane][i];
  r.known[me.lane] = w.clock[me.lane] + 1;
  out[me.block->id] = r;
  w.clock[me.lane] = tick(w);
  load_clock();
  return out;
}

bool covered(const Clock& clock, u32 epoch, u32 block, u32 thread, u32 at) {
  auto it = clock.find(block);
  if (it == clock.end()) return false;
  const Release& r = it->second;
  return epoch < r.epoch || (epoch == r.epoch && thread / 32 == r.warp && at < r.known[thread % 32]);
}

}  // namespace

bool ordered_before_me(u32 epoch, u32 block, u32 thread, u32 clock) {
  const Fiber& me = *machine->current;
  if (block == me.block->id) {
    if (epoch != me.block->epoch || thread == me.thread) return true;
    const Warp& w = me.block->warps[me.warp];
    return clock < (thread / 32 == me.warp ? w.known[me.lane][thread % 32] : w.heard[thread / 32 & 31u]);
  }
  return covered(me.acquired, epoch, block, thread, clock) || covered(me.block->acquired, epoch, block, thread, clock);
}

// Whether all warps that read a word of shared memory in this epoch are heard of since. If several of the running warp's
// own lanes read it, they are not told apart: the warp has to have synchronised.
bool stamps_ordered_before_me(u64 word) {
  const Fiber& me = *machine->current;
  const Block& b = *me.block;
  const u64 words = machine->shared_bytes / 4 + 2;
  for (u32 v = 0; v < b.warps.size(); ++v) {
    const u64 stamp = b.stamps[v * words + word];
    if (stamp >> (kClockBits + kStampLaneBits) != b.epoch) continue;
    if (v == me.warp && (stamp >> kClockBits & kManyLanes * 2 - 1) == me.lane) continue;
    const u32 clock = stamp & kClockMask, known = v == me.warp ? b.warps[v].clock[me.lane] : b.warps[me.warp].heard[v];
    if (clock >= known) return false;
  }
  return true;
}

bool readers_ordered_before_me(const Reader& r) {
  const u32 warp = r.who >> kClockBits & 31u, clock = r.who & kClockMask;
  if (r.who & kManyWarps) {  // only a later epoch, a stamp of each, or a release after it, is known to follow all of them
    if (r.block == machine->current->block->id)
      return r.epoch != machine->current->block->epoch || (hot.word != kNoWord && stamps_ordered_before_me(hot.word));
    return ordered_before_me(r.epoch, r.block, 1u << 20, kClockMask);
  }
  for (u32 lanes = r.mask; lanes; lanes &= lanes - 1)
    if (!ordered_before_me(r.epoch, r.block, warp * 32 + static_cast<u32>(__builtin_ctz(lanes)), clock)) return false;
  return true;
}

namespace {

// ------------------------------------------------------------------------------------------------ accesses

template <bool Write>
EMU_SLOW void race(const Cell& c, u32 first, Mode mode, uptr a, u32 n, void* pc, int line) {
  u32 other = 0, other_block = 0;
  const char* what = write_conflict(c, first, mode, &other, &other_block);
  if (!what && Write) what = read_conflict(c, first, mode, &other, &other_block);
  if (what)
    report("race", a, n, pc, line, other_block, other, "%s of what another thread has %s, with no %s between",
           Write ? "write" : "read", what,
           other_block == hot.block ? "barrier" : "release and acquire");
}

template <bool Write, bool Shared>
EMU_INLINE void touch_cell(Cell& c, u32 first, u32 atomic_read, u32 atomic_write, uptr a, u32 n, void* pc) {
  const Mode mode = atomic_read ? Mode::kAtomic : Mode::kPlain;
  if (Shared && !Write && EMU_UNLIKELY(c.w_epoch < first))
    report("uninitialised", a, n, pc, 0, 0, kNobody, "read of shared memory that nothing wrote");
  if (EMU_UNLIKELY(!quiet_writer(c, first) || (Write && !quiet_readers(c, first)))) race<Write>(c, first, mode, a, n, pc, 0);
  if (Write) note_write(c, atomic_write);
  else note_read(c, first, atomic_read);
}

// A word that is the target of a copy, or whose bytes have different histories, or an access to a part of a word.
template <bool Write, bool Shared>
EMU_SLOW void touch_parts(Cell& c, Cell* bytes, u32 mask, u32 first, u32 atomic_read, u32 atomic_write, uptr a, u32 n,
                          void* pc) {
  if (c.flags & kInFlight) {
    report("async-copy", a, n, pc, 0, c.w_block, c.w_who >> kClockBits & 1023u,
           "%s of the destination of an asynchronous copy before its wait", Write ? "write" : "read");
    return;
  }
  if (!(c.flags & kSplit)) {
    for (int i = 0; i < 4; ++i) {
      bytes[i] = c;
      if (c.r_who & kManyBlocks)
        if (auto it = many_blocks.find(&c); it != many_blocks.end()) many_blocks[&bytes[i]] = std::vector<Reader>(it->second);
    }
    c.flags |= kSplit;
  }
  bool many = false;
  for (u32 i = 0; i < 4; ++i) {
    if (mask >> i & 1) touch_cell<Write, Shared>(bytes[i], first, atomic_read, atomic_write, a, n, pc);
    many |= (bytes[i].r_who & kManyBlocks) != 0;
  }
  if (Write && mask == 15 && !many) {  // one history again
    c = bytes[0];
    c.flags = 0;
  }
}

template <bool Write, bool Shared>
EMU_INLINE void touch(u64 word, u32 mask, u32 atomic_read, u32 atomic_write, uptr a, u32 n, void* pc) {
  Cell& c = (Shared ? hot.shared_cells : hot.cells)[word];
  if (Shared && !Write) {
    // In one epoch the lane of a stamp is that of all reads, or many's.
    const u64 changed = hot.stamps[word] ^ hot.stamp;
    const bool many = changed >> kClockBits != 0 && changed >> (kClockBits + kStampLaneBits) == 0;
    hot.stamps[word] = many ? hot.stamp | u64{kManyLanes} << kClockBits : hot.stamp;
  }
  if (Write) hot.word = Shared ? word : kNoWord;
  const u32 first = Shared ? hot.block_first : hot.launch_first;
  if (EMU_LIKELY(mask == 15 && c.flags == 0))
    touch_cell<Write, Shared>(c, first, atomic_read, atomic_write, a, n, pc);
  else
    touch_parts<Write, Shared>(c, (Shared ? hot.shared_byte_cells : hot.byte_cells) + 4 * word, mask, first, atomic_read,
                               atomic_write, a, n, pc);
}

// The access itself could trap (an aligned SSE move): the launch ends here.
EMU_SLOW void bad_alignment(uptr a, u32 n, void* pc) {
  report("misaligned", a, n, pc, 0, 0, kNobody, "access of %u bytes at an address that is %u above a multiple of %u", n,
         static_cast<u32>(a % n), n);
  abandon();
}

EMU_SLOW void beyond_shared(uptr a, u32 n, void* pc, bool write) {
  report("out-of-bounds", a, n, pc, 0, 0, kNobody, "%s of %u bytes outside the %u bytes of shared memory",
         write ? "write" : "read", n, hot.shared_bytes);
}

EMU_SLOW void bad_state(uptr a, u32 n, void* pc, bool write) {
  const u64 offset = a - hot.arena_low;
  bool outside = false, read_only = false;
  for (u32 i = 0; i < n; ++i) {
    const u64 o = offset + i;
    const u16 s = o < hot.arena_bytes ? static_cast<u16>(hot.state[o >> 2] >> (o & 3)) : u16{0};
    outside |= !(s & 0x0001);
    read_only |= write && !(s & 0x1000);
  }
  if (outside) {
    bool gap = false;
    for (const Region& r : machine->regions) gap |= offset >= r.low && offset + n <= r.low + r.bytes;
    report(gap ? "gap" : "out-of-bounds", a, n, pc, 0, 0, kNobody, "%s of %u bytes %s", write ? "write" : "read", n,
           gap ? "between the elements of a strided array" : "outside the array");
  } else if (read_only) {
    report("read-only", a, n, pc, 0, 0, kNobody, "write of %u bytes to a read-only array", n);
  } else {
    report("uninitialised", a, n, pc, 0, 0, kNobody, "read of %u bytes that nothing wrote", n);
  }
}

// Neither stack nor shared memory nor the arena: static data of the kernel may be read, the rest is wild.
EMU_SLOW void elsewhere(uptr a, u32 n, void* pc, bool write) {
  if (!machine || !machine->current) return;  // a static constructor
  if (!write)
    for (const auto& [low, high] : machine->own_segments)
      if (a >= low && a + n <= high) return;
  const uptr shared = reinterpret_cast<uptr>(shared_memory);
  if (a >= shared - kSharedGuard && a < shared) beyond_shared(a, n, pc, write);
  else
    report("wild-address", a, n, pc, 0, 0, kNobody, "%s of %u bytes at 0x%llx, which is %s", write ? "write" : "read", n,
           static_cast<unsigned long long>(a), a < 4096 ? "a null pointer" : "no array, no shared memory, no local variable");
  abandon();
}

EMU_SLOW void runaway() {
  report("runaway", 0, 0, nullptr, 0, 0, kNobody, "a thread made 2^28 accesses without waiting for anything: a spin loop needs emu_yield");
  abandon();
}

template <u32 N, bool Write>
EMU_INLINE void access(uptr a, void* pc, u32 atomic_read = 0, u32 atomic_write = 0) {
  if (a - hot.stack_low < hot.stack_bytes) return;
  if (EMU_UNLIKELY(--hot.budget < 0)) runaway();
  if (Write) ++hot.writes;
  constexpr u32 kWords = N < 4 ? 1 : N / 4;
  const u32 mask = N < 4 ? ((1u << (N & 3)) - 1) << (a & 3) : 15u;
  if (const uptr s = a - reinterpret_cast<uptr>(shared_memory); s < kSharedMax + kSharedGuard) {
    if (EMU_UNLIKELY(s + N > hot.shared_bytes)) return beyond_shared(a, N, pc, Write);
    if (EMU_UNLIKELY(a & (N - 1))) return bad_alignment(a, N, pc);
    for (u32 i = 0; i < kWords; ++i) touch<Write, true>(s / 4 + i, mask, atomic_read, atomic_write, a, N, pc);
    return;
  }
  const u64 g = a - hot.arena_low;
  if (EMU_UNLIKELY(g >= hot.arena_bytes)) return elsewhere(a, N, pc, Write);
  if (EMU_UNLIKELY(a & (N - 1))) return bad_alignment(a, N, pc);
  u16* state = hot.state + g / 4;
  for (u32 i = 0; i < kWords; ++i) {
    const u32 want = Write ? mask | mask << 12 : mask, care = Write ? want : mask | mask << 4;
    if (EMU_UNLIKELY((state[i] & care) != want)) {
      bad_state(a, N, pc, Write);
      if (!Write || (state[i] & want) != want) return;
    }
    if (Write) state[i] = static_cast<u16>((state[i] & ~(mask << 4)) | mask << 8);
  }
  if (g < hot.tracked_bytes)
    for (u32 i = 0; i < kWords; ++i) touch<Write, false>(g / 4 + i, mask, atomic_read, atomic_write, a, N, pc);
}

template <bool Write>
void access_range(uptr a, u64 n, void* pc) {
  if (a - hot.stack_low < hot.stack_bytes) return;
  for (; n && (a & 3); ++a, --n) access<1, Write>(a, pc);
  for (; n >= 4; a += 4, n -= 4) access<4, Write>(a, pc);
  for (; n; ++a, --n) access<1, Write>(a, pc);
}

template <bool Write>
void access_atomic(uptr a, u32 n, void* pc) {
  switch (n) {
    case 1: return access<1, Write>(a, pc, kReadAtomic, kWriteAtomic);
    case 2: return access<2, Write>(a, pc, kReadAtomic, kWriteAtomic);
    case 4: return access<4, Write>(a, pc, kReadAtomic, kWriteAtomic);
    case 8: return access<8, Write>(a, pc, kReadAtomic, kWriteAtomic);
    default: return access<16, Write>(a, pc, kReadAtomic, kWriteAtomic);
  }
}

// A relaxed access: with a fence after the read, or before the write, it orders blocks.
void relaxed_read(uptr a) {
  if (auto it = machine->published.find(a); it != machine->published.end()) merge(machine->current->pending, it->second);
}
void relaxed_write(uptr a, bool keep_earlier) {
  Fiber& me = *machine->current;
  if (!keep_earlier) machine->published.erase(a);
  if (!me.fenced.empty()) merge(machine->published[a], me.fenced);
}

// ------------------------------------------------------------------------------------------------ tensor cores

constexpr int kMmaBf16 = 17, kMmaF16 = 18, kMmaTf32 = 19, kLoadMatrices = 20, kLoadMatricesTransposed = 21,
              kNamedBarrier = 22;

// What a lane brings to an mma, and to an ldmatrix; `value` of its fiber points here.
struct MmaOperands {
  float* d;
  const u32* a;
  u32 b[2];
};
struct MatrixRow {
  uptr row;
  u32* result;
  uptr reads[4];  // the words that this lane loads, one a matrix; the last lane to arrive fills them in
};

float bits_to_float(u32 bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

double widen_f16(u32 h) {
  const u32 magnitude = (h & 0x7fffu) << 13;
  // Exponents differ by 112; as a product, so that subnormals come out right.
  const float v = (h & 0x7c00u) == 0x7c00u ? bits_to_float(magnitude | 0x7f800000u) : bits_to_float(magnitude) * 0x1p112f;
  return h & 0x8000u ? -v : v;
}

double widen_16(int kind, u32 h) { return kind == kMmaF16 ? widen_f16(h) : bits_to_float(h << 16); }

// The fragments are those of the PTX ISA: mma.m16n8k16 with 16-bit elements, mma.m16n8k8 with tf32.
void multiply(int kind, const Fiber* lanes) {
  double a[16][16], b[16][8], d[16][8];
  const u32 depth = kind == kMmaTf32 ? 8 : 16;
  for (u32 lane = 0; lane < 32; ++lane) {
    const auto& from = *reinterpret_cast<const MmaOperands*>(lanes[lane].value);
    const u32 group = lane / 4, member = lane % 4;
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = group + 8 * (i % 2), half = i / 2;
      if (kind == kMmaTf32) {
        a[row][member + 4 * half] = bits_to_float(from.a[i] & 0xffffe000u);
      } else {
        a[row][2 * member + 8 * half] = widen_16(kind, from.a[i] & 0xffffu);
        a[row][2 * member + 8 * half + 1] = widen_16(kind, from.a[i] >> 16);
      }
      d[group + 8 * (i / 2)][2 * member + i % 2] = from.d[i];
    }
    for (u32 i = 0; i < 2; ++i) {
      if (kind == kMmaTf32) {
        b[member + 4 * i][group] = bits_to_float(from.b[i] & 0xffffe000u);
      } else {
        b[2 * member + 8 * i][group] = widen_16(kind, from.b[i] & 0xffffu);
        b[2 * member + 8 * i + 1][group] = widen_16(kind, from.b[i] >> 16);
      }
    }
  }
  for (u32 row = 0; row < 16; ++row)
    for (u32 k = 0; k < depth; ++k)
      for (u32 column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (u32 lane = 0; lane < 32; ++lane) {
    float* to = reinterpret_cast<const MmaOperands*>(lanes[lane].value)->d;
    for (u32 i = 0; i < 4; ++i) to[i] = static_cast<float>(d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
  }
}

// The values are taken when all lanes have come; each lane tells the shadow of its reads when it goes on.
void load_matrices(bool transposed, const Fiber* lanes) {
  auto of = [lanes](u32 lane) -> MatrixRow& { return *reinterpret_cast<MatrixRow*>(lanes[lane].value); };
  auto element = [](uptr row, u32 column) -> u32 {
    u16 v;
    std::memcpy(&v, reinterpret_cast<const void*>(row + 2 * column), 2);
    return v;
  };
  for (u32 lane = 0; lane < 32; ++lane) {
    const u32 group = lane / 4, member = lane % 4;
    for (u32 i = 0; i < 4; ++i) {
      const uptr row = of(8 * i + group).row;
      of(lane).reads[i] = row + 4 * member;
      const uptr low = transposed ? of(8 * i + 2 * member).row : row, high = transposed ? of(8 * i + 2 * member + 1).row : row;
      of(lane).result[i] =
          element(low, transposed ? group : 2 * member) | element(high, transposed ? group : 2 * member + 1) << 16;
    }
  }
}

// ------------------------------------------------------------------------------------------------ waiting

void wait(State state, int line) {
  Fiber& me = *machine->current;
  me.state = state;
  me.line = line;
  switch_out();
}

void make_ready(Fiber& f) {
  f.state = State::kReady;
  f.block->ready.push_back(&f);
}

const char* place(const Fiber& f, char (&out)[96]) {
  static const char* const names[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
                                      "__ballot_sync", "__any_sync", "__all_sync", "__match_any_sync"};
  static const char* const matrix_names[] = {"mma of bf16", "mma of f16", "mma of tf32", "ldmatrix", "ldmatrix.trans",
                                             "a named barrier"};
  switch (f.state) {
    case State::kReady: std::snprintf(out, sizeof out, "is running"); break;
    case State::kYielded: std::snprintf(out, sizeof out, "is spinning"); break;
    case State::kBarrier: std::snprintf(out, sizeof out, "waits at __syncthreads in line %d", f.line); break;
    case State::kNamed: std::snprintf(out, sizeof out, "waits at a named barrier in line %d", f.line); break;
    case State::kDone: std::snprintf(out, sizeof out, "has exited"); break;
    case State::kWarp:
      std::snprintf(out, sizeof out, "waits at %s in line %d with mask 0x%08x",
                    f.kind <= 8           ? names[f.kind]
                    : f.kind < kMmaBf16   ? "__reduce_sync"
                                          : matrix_names[f.kind - kMmaBf16],
                    f.line, f.mask);
  }
  return out;
}

[[noreturn]] EMU_SLOW void hopeless(const char* kind, int line, const Fiber& other, const char* what) {
  char where[96];
  report(kind, 0, 0, nullptr, line, other.block->id, other.thread, "%s, but thread %u %s", what, other.thread,
         place(other, where));
  abandon();
}

void complete_barrier(Block& b) {
  b.epoch = ++machine->last_epoch;
  b.barrier_result = b.votes;
  b.arrived = 0;
  b.votes = 0;
  for (Warp& w : b.warps) {
    w.at_barrier = 0;
    std::memset(w.heard, 0, sizeof w.heard);
    if (w.counter) {
      w.counter = 0;
      std::memset(w.clock, 0, sizeof w.clock);
      std::memset(w.known, 0, sizeof w.known);
    }
  }
  for (Fiber& f : b.fibers) {
    if (!f.acquired.empty()) {
      merge(b.acquired, f.acquired);
      f.acquired.clear();
    }
    make_ready(f);
  }
  shuffle(b.ready);
  ++machine->events;
}

// ------------------------------------------------------------------------------------------------ asynchronous copies

void issue_copy(uptr destination, uptr source, u32 bytes, u32 source_bytes, void* pc) {
  Fiber& me = *machine->current;
  const uptr s = destination - reinterpret_cast<uptr>(shared_memory);
  if ((bytes != 4 && bytes != 8 && bytes != 16) || source_bytes > bytes || destination % bytes || source % bytes) {
    report("misaligned", destination % bytes ? destination : source, bytes, pc, 0, 0, kNobody,
           "asynchronous copy of %u bytes (%u from the source): sizes are 4, 8 or 16 and both addresses multiples of it",
           bytes, source_bytes);
    return;
  }
  if (s >= kSharedMax || s + bytes > hot.shared_bytes) {
    report("out-of-bounds", destination, bytes, pc, 0, 0, kNobody,
           "asynchronous copy of %u bytes to an address outside the %u bytes of shared memory", bytes, hot.shared_bytes);
    return;
  }
  access_range<false>(source, source_bytes, pc);
  access_range<true>(destination, bytes, pc);
  Copy c{destination, source, bytes, source_bytes, me.groups, pc, {}};
  std::memcpy(c.snapshot, reinterpret_cast<const void*>(source), source_bytes);
  for (u32 i = 0; i < bytes; i += 4) hot.shared_cells[(s + i) / 4].flags |= kInFlight;
  me.copies.push_back(c);
}

void land(const Copy& c) {
  access_range<false>(c.source, c.source_bytes, c.pc);
  if (std::memcmp(c.snapshot, reinterpret_cast<const void*>(c.source), c.source_bytes) != 0)
    report("async-source", c.source, c.source_bytes, c.pc, 0, 0, kNobody,
           "the source of an asynchronous copy changed before its wait");
  auto* to = reinterpret_cast<u8*>(c.destination);
  std::memcpy(to, reinterpret_cast<const void*>(c.source), c.source_bytes);
  std::memset(to + c.source_bytes, 0, c.bytes - c.source_bytes);
  const uptr s = c.destination - reinterpret_cast<uptr>(shared_memory);
  for (u32 i = 0; i < c.bytes; i += 4) {
    Cell& cell = hot.shared_cells[(s + i) / 4];
    cell.flags = 0;
    note_write(cell, 0);
  }
}

void wait_copies(u32 before_group) {
  auto& copies = machine->current->copies;
  std::size_t n = 0;
  while (n < copies.size() && copies[n].group < before_group) land(copies[n++]);
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(n));
}

// ------------------------------------------------------------------------------------------------ named barriers

// A warp comes to a barrier, at `now` of its clock: returns the phase that it is part of.
u32 come_to(Block& b, u32 warp, u32 now, u32 number, u32 threads, bool wait, int line) {
  NamedBarrier& n = b.named[number];
  Warp& w = b.warps[warp];
  if (n.come && (n.threads != threads || n.warps >> warp & 1)) {
    const u32 other = static_cast<u32>(__builtin_ctz(n.warps));
    report("divergent-barrier", 0, 0, nullptr, line, b.id, n.warps >> warp & 1 ? warp * 32 : other * 32,
           n.threads != threads ? "named barrier %u of %u threads, but others came to it in line %d for %u"
                                : "named barrier %u of %u threads: this warp has come in line %d, and the phase of %u is not over",
           number, threads, n.line, n.threads);
    abandon();
  }
  if (!n.come) std::memset(n.heard, 0, sizeof n.heard);
  n.threads = threads;
  n.line = line;
  n.warps |= 1u << warp;
  if (wait) n.waiting |= 1u << warp;
  for (u32 v = 0; v < 32; ++v) n.heard[v] = std::max(n.heard[v], w.heard[v]);
  n.heard[warp] = std::max(n.heard[warp], now);
  const u32 phase = n.phase;
  if ((n.come += 32) < threads) return phase;
  for (u32 m = n.waiting; m; m &= m - 1) {
    const auto v = static_cast<u32>(__builtin_ctz(m));
    for (u32 i = 0; i < 32; ++i) b.warps[v].heard[i] = std::max(b.warps[v].heard[i], n.heard[i]);
    for (u32 lane = 0; lane < 32; ++lane)
      if (Fiber& f = b.fibers[32 * v + lane]; f.state == State::kNamed) make_ready(f);
  }
  shuffle(b.ready);
  n.come = n.warps = n.waiting = 0;
  ++n.phase;
  ++machine->events;
  return phase;
}

// ------------------------------------------------------------------------------------------------ warp operations

void finish_warp_operation(Block& b, u32 first_thread, u32 mask) {
  Warp& w = b.warps[first_thread / 32];
  Fiber* lanes = &b.fibers[first_thread];
  Fiber& me = *machine->current;
  auto each = [mask](auto&& f) {
    for (u32 m = mask; m; m &= m - 1) f(static_cast<u32>(__builtin_ctz(m)));
  };
  u64 all = 0;
  const int kind = me.kind;
  if (kind == 0 || kind == kNamedBarrier) {  // they order memory among their lanes
    u32 joint[32] = {};
    const u32 now = tick(w);
    Clock acquired;
    each([&](u32 i) {
      for (int k = 0; k < 32; ++k) joint[k] = std::max(joint[k], w.known[i][k]);
      if (!lanes[i].acquired.empty()) merge(acquired, lanes[i].acquired);
    });
    each([&](u32 i) { joint[i] = now; });
    each([&](u32 i) {
      std::memcpy(w.known[i], joint, sizeof joint);
      w.clock[i] = now;
      if (!acquired.empty()) merge(lanes[i].acquired, acquired);
    });
    load_clock();
    if (kind == kNamedBarrier) {
      each([&](u32 i) {
        if (lanes[i].value == me.value) return;
        report("divergent-barrier", 0, 0, nullptr, me.line, b.id, lanes[i].thread,
               "the lanes of a warp come to different named barriers, or in different ways");
        abandon();
      });
      const u32 phase = come_to(b, me.warp, now, static_cast<u32>(me.value & 15u), static_cast<u32>(me.value >> 5),
                                me.value & 16u, me.line);
      each([&](u32 i) { lanes[i].result = phase; });
    }
  } else if (kind <= 4) {
    each([&](u32 i) {
      const u32 source = lanes[i].source;
      if (source < 32 && mask >> source & 1) {
        lanes[i].result = lanes[source].value;
        return;
      }
      char where[96] = "does not exist";
      if (source < 32 && w.exists >> source & 1) place(lanes[source], where);
      report("warp-source", 0, 0, nullptr, me.line, 0, kNobody, "lane %u of warp %u reads lane %u, which is not in the mask 0x%08x and %s",
             i, first_thread / 32, source, mask, where);
      abandon();
    });
  } else if (kind >= kLoadMatrices) {
    load_matrices(kind == kLoadMatricesTransposed, lanes);
  } else if (kind >= kMmaBf16) {
    multiply(kind, lanes);
  } else {
    bool first = true;
    each([&](u32 i) {
      const u64 v = lanes[i].value;
      const auto sv = static_cast<std::int32_t>(v), sa = static_cast<std::int32_t>(all);
      const auto uv = static_cast<u32>(v), ua = static_cast<u32>(all);
      switch (kind) {
        case 5: all |= (v & 1) << i; break;                                  // ballot
        case 6: all |= v & 1; break;                                         // any
        case 7: all = first ? v & 1 : all & v; break;                        // all
        case 8: each([&](u32 j) { lanes[i].result |= u64{lanes[j].value == v} << j; }); break;  // match any
        case 9: all = static_cast<u32>(ua + uv); break;
        case 10: all = first || uv < ua ? uv : ua; break;
        case 11: all = first || uv > ua ? uv : ua; break;
        case 12: all = first || sv < sa ? v : all; break;
        case 13: all = first || sv > sa ? v : all; break;
        case 14: all = first ? v : all & v; break;
        case 15: all |= v; break;
        default: all ^= v;
      }
      first = false;
    });
    if (kind != 8) each([&](u32 i) { lanes[i].result = all; });
  }
  w.waiting &= ~mask;
  const std::size_t old = b.ready.size();
  each([&](u32 i) {
    if (&lanes[i] != &me) make_ready(lanes[i]);
  });
  for (std::size_t i = b.ready.size(); i > old + 1; --i)
    std::swap(b.ready[i - 1], b.ready[old + below(static_cast<u32>(i - old))]);
  me.state = State::kReady;
  ++machine->events;
}

// ------------------------------------------------------------------------------------------------ threads

// A struct argument of more than 16 bytes travels on the stack (x86-64) or behind a pointer (aarch64): a callee that
// takes fewer bytes reads the first ones of this, so one type serves every size.
struct Arguments {
  alignas(16) u8 bytes[1024];
};

void fiber_main() {
  Fiber& me = *machine->current;
  Arguments arguments;
  std::memcpy(arguments.bytes, machine->arguments.data(), machine->arguments.size());
  reinterpret_cast<void (*)(Arguments)>(machine->entry)(arguments);
  Block& b = *me.block;
  Warp& w = b.warps[me.warp];
  if (!me.copies.empty())
    report("copy-not-awaited", me.copies[0].destination, me.copies[0].bytes, me.copies[0].pc, 0, 0, kNobody,
           "the thread exits with %zu asynchronous copies that it never waited for", me.copies.size());
  me.state = State::kDone;
  if (b.arrived)
    for (const Fiber& f : b.fibers)
      if (f.state == State::kBarrier) hopeless("exit-before-barrier", f.line, f, "this thread exits");
  for (u32 m = w.waiting; m; m &= m - 1) {
    const Fiber& f = b.fibers[me.warp * 32 + static_cast<u32>(__builtin_ctz(m))];
    if (f.mask >> me.lane & 1) hopeless("warp-divergence", f.line, f, "this thread exits");
  }
  w.done |= 1u << me.lane;
  if (++b.exited == b.fibers.size())
    for (u32 i = 0; i < 16; ++i)
      if (const NamedBarrier& n = b.named[i]; n.come)
        report("barrier-not-over", 0, 0, nullptr, n.line, b.id, static_cast<u32>(__builtin_ctz(n.warps)) * 32,
               "the block ends with %u of %u threads at named barrier %u", n.come, n.threads, i);
  ++machine->events;
  for (;;) switch_out();
}

void start_block(Block& b, u32 id) {
  Machine& m = *machine;
  b.id = id;
  b.index = unlinear(id, m.grid_dim);
  b.epoch = b.first = ++m.last_epoch;
  b.arrived = b.exited = 0;
  b.votes = b.barrier_result = b.barrier_line = 0;
  std::fill(std::begin(b.named), std::end(b.named), NamedBarrier{});
  b.acquired.clear();
  b.ready.clear();
  b.yielded.clear();
  std::fill(b.shared.begin(), b.shared.end(), u8{0xff});
  if (m.entered == &b) std::memset(shared_memory, 0xff, m.shared_bytes);
  for (u64 i = 0; i < m.shared_bytes / 4 + 1; ++i) b.cells[i].flags &= ~kInFlight;
  for (u32 w = 0; w < b.warps.size(); ++w) {
    b.warps[w] = Warp{};
    const u32 left = m.threads - 32 * w;
    b.warps[w].exists = left >= 32 ? ~0u : (1u << left) - 1;
  }
  for (u32 t = 0; t < m.threads; ++t) {
    Fiber& f = b.fibers[t];
    char* stack = f.stack;
    f = Fiber{};
    f.stack = stack;
    f.block = &b;
    f.thread = t;
    f.warp = t / 32;
    f.lane = t % 32;
    f.index = unlinear(t, m.block_dim);
    f.stack_pointer = fresh_stack(stack, t, fiber_main);
    make_ready(f);
  }
  shuffle(b.ready);
  m.count_threads += m.threads;
}

void enter(Block& b) {
  Machine& m = *machine;
  if (m.entered != &b) {
    if (m.entered) std::memcpy(m.entered->shared.data(), shared_memory, m.shared_bytes);
    std::memcpy(shared_memory, b.shared.data(), m.shared_bytes);
    m.entered = &b;
  }
  hot.shared_cells = b.cells;
  hot.shared_byte_cells = b.byte_cells;
  hot.block = b.id;
  hot.block_first = b.first;
}

void resume(Fiber& f) {
  Machine& m = *machine;
  m.current = &f;
  hot.epoch = f.block->epoch;
  hot.stack_low = reinterpret_cast<uptr>(f.stack);
  hot.stack_bytes = kStackBytes;
  hot.lane_bit = 1u << f.lane;
  hot.stamps = f.block->stamps + f.warp * (m.shared_bytes / 4 + 2);
  hot.budget = kBudget;
  load_clock();
  ++m.count_switches;
  emu_switch(&m.scheduler, f.stack_pointer);
  m.count_accesses += static_cast<u64>(kBudget - hot.budget);
  hot.stack_bytes = 0;
  m.current = nullptr;
}

void report_deadlock(const std::vector<Block*>& active) {
  Machine& m = *machine;
  char mine[96], theirs[96];
  for (Block* b : active)
    for (Fiber& f : b->fibers) {
      if (f.state == State::kNamed) {
        report("deadlock", 0, 0, nullptr, f.line, b->id, f.thread,
               "nothing can run: thread %u %s, to which too few come", f.thread, place(f, mine));
        return;
      }
      if (f.state != State::kWarp && f.state != State::kBarrier) continue;
      m.current = &f;
      for (Fiber& g : b->fibers) {
        const bool expected = f.state == State::kBarrier ? g.state != State::kBarrier
                                                         : g.warp == f.warp && (f.mask >> g.lane & 1) && &g != &f &&
                                                               !(g.state == State::kWarp && g.kind == f.kind && g.mask == f.mask && g.line == f.line);
        if (!expected) continue;
        report(f.state == State::kWarp ? "warp-divergence" : "deadlock", 0, 0, nullptr, f.line, b->id, g.thread,
               "nothing can run: the thread %s, but thread %u %s", place(f, mine), g.thread, place(g, theirs));
        m.current = nullptr;
        return;
      }
    }
  report("deadlock", 0, 0, nullptr, 0, 0, kNobody, "nothing can run");
}

void run_blocks(u64 blocks, bool shuffled) {
  Machine& m = *machine;
  std::vector<u32> order(blocks);
  for (u64 i = 0; i < blocks; ++i) order[i] = static_cast<u32>(i);
  if (shuffled)
    for (u64 i = blocks; i > 1; --i) std::swap(order[i - 1], order[below(static_cast<u32>(i))]);
  u64 next = 0, writes = 0, events = 0;
  int idle = 0;
  std::vector<Block*> active, candidates;
  for (auto& slot : m.slots) {
    if (next == blocks) break;
    start_block(*slot, order[next++]);
    active.push_back(slot.get());
  }
  std::vector<Fiber*> round;
  while (!active.empty()) {
    candidates.clear();
    for (Block* b : active)
      if (!b->ready.empty()) candidates.push_back(b);
    if (candidates.empty()) {
      bool any = false;
      for (Block* b : active) {
        any |= !b->yielded.empty();
        for (Fiber* f : b->yielded) make_ready(*f);
        b->yielded.clear();
        shuffle(b->ready);
      }
      if (!any) return report_deadlock(active);
      idle = writes == hot.writes && events == m.events ? idle + 1 : 0;
      writes = hot.writes;
      events = m.events;
      if (idle > kIdleRounds) {
        for (Block* b : active)
          if (!b->ready.empty()) m.current = b->ready[0];
        report("runaway", 0, 0, nullptr, m.current->line, 0, kNobody,
               "threads spin and nothing changes: what they wait for never comes (%zu blocks are resident, %llu not yet started)",
               active.size(), static_cast<unsigned long long>(blocks - next));
        m.current = nullptr;
        return;
      }
      continue;
    }
    Block& b = *candidates[candidates.size() == 1 ? 0 : below(static_cast<u32>(candidates.size()))];
    enter(b);
    round.swap(b.ready);
    b.ready.clear();
    for (Fiber* f : round) {
      resume(*f);
      if (m.aborted) return;
    }
    if (b.exited == m.threads) {
      if (next < blocks) start_block(b, order[next++]);
      else active.erase(std::find(active.begin(), active.end(), &b));
    }
  }
}

}  // namespace
}  // namespace emu

using namespace emu;

// ------------------------------------------------------------------------------------------------ hooks of g++

#define EMU_HOOKS(n)                                                                                          \
  HOOK void __tsan_read##n(void* p) { access<n, false>(reinterpret_cast<uptr>(p), PC); }                      \
  HOOK void __tsan_write##n(void* p) { access<n, true>(reinterpret_cast<uptr>(p), PC); }                      \
  HOOK void __tsan_unaligned_read##n(void* p) { access<n, false>(reinterpret_cast<uptr>(p), PC); }            \
  HOOK void __tsan_unaligned_write##n(void* p) { access<n, true>(reinterpret_cast<uptr>(p), PC); }            \
  HOOK void __tsan_volatile_read##n(void* p) {                                                                \
    if (reinterpret_cast<uptr>(p) - hot.stack_low < hot.stack_bytes) return;                                  \
    emu_yield();                                                                                              \
    access_atomic<false>(reinterpret_cast<uptr>(p), n, PC);                                                   \
    relaxed_read(reinterpret_cast<uptr>(p));                                                                  \
  }                                                                                                           \
  HOOK void __tsan_volatile_write##n(void* p) {                                                               \
    if (reinterpret_cast<uptr>(p) - hot.stack_low < hot.stack_bytes) return;                                  \
    access_atomic<true>(reinterpret_cast<uptr>(p), n, PC);                                                    \
    relaxed_write(reinterpret_cast<uptr>(p), false);                                                          \
  }                                                                                                           \
  HOOK void __tsan_unaligned_volatile_read##n(void* p) { __tsan_volatile_read##n(p); }                        \
  HOOK void __tsan_unaligned_volatile_write##n(void* p) { __tsan_volatile_write##n(p); }

HOOK void emu_yield() {
  if (!machine || !machine->current) return;
  Fiber& me = *machine->current;
  me.block->yielded.push_back(&me);
  wait(State::kYielded, 0);
}

EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)

HOOK void __tsan_read_range(void* p, unsigned long n) { access_range<false>(reinterpret_cast<uptr>(p), n, PC); }
HOOK void __tsan_write_range(void* p, unsigned long n) { access_range<true>(reinterpret_cast<uptr>(p), n, PC); }
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_init() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}

// Layout of the data that -fsanitize=alignment passes (version 1).
struct AlignmentData {
  const char* file;
  u32 line, column;
  const struct {
    u16 kind, info;
    char name[1];
  } * type;
  u8 log_alignment, access;
};
HOOK void __ubsan_handle_type_mismatch_v1(AlignmentData* data, uptr pointer) {
  if (!machine || !machine->current || pointer - hot.stack_low < hot.stack_bytes) return;
  const u32 alignment = 1u << data->log_alignment;
  report("misaligned", pointer, alignment, PC, 0, 0, kNobody, "access to %s at an address that is %u above a multiple of %u",
         data->type->name, static_cast<u32>(pointer % alignment), alignment);
  abandon();
}

HOOK void* emu_memcpy(void* to, const void* from, std::size_t n) {
  access_range<false>(reinterpret_cast<uptr>(from), n, PC);
  access_range<true>(reinterpret_cast<uptr>(to), n, PC);
  return std::memmove(to, from, n);
}
HOOK void* emu_memmove(void* to, const void* from, std::size_t n) {
  access_range<false>(reinterpret_cast<uptr>(from), n, PC);
  access_range<true>(reinterpret_cast<uptr>(to), n, PC);
  return std::memmove(to, from, n);
}
HOOK void* emu_memset(void* to, int value, std::size_t n) {
  access_range<true>(reinterpret_cast<uptr>(to), n, PC);
  return std::memset(to, value, n);
}
HOOK void __assert_fail(const char* what, const char*, unsigned line, const char*) noexcept {
  report("assert", 0, 0, PC, static_cast<int>(line), 0, kNobody, "assertion failed: %s", what);
  abandon();
}

// ------------------------------------------------------------------------------------------------ built-ins of CUDA

HOOK Index emu_thread_index() { return machine->current->index; }
HOOK Index emu_block_index() { return machine->current->block->index; }
HOOK Index emu_block_dim() { return machine->block_dim; }
HOOK Index emu_grid_dim() { return machine->grid_dim; }
HOOK unsigned emu_lane() { return machine->current->lane; }
HOOK unsigned emu_active_mask() {
  const Fiber& me = *machine->current;
  const Warp& w = me.block->warps[me.warp];
  return w.exists & ~w.done;
}

HOOK void emu_trap(int line) {
  report("trap", 0, 0, PC, line, 0, kNobody, "__trap was called");
  abandon();
}

HOOK int emu_barrier(int reduce, int predicate, int line) {
  Fiber& me = *machine->current;
  Block& b = *me.block;
  if (b.exited || (b.arrived && b.barrier_line != line))
    for (const Fiber& f : b.fibers) {
      if (b.exited && f.state == State::kDone) {
        me.line = line;
        hopeless("exit-before-barrier", line, f, "this thread waits at __syncthreads");
      }
      if (!b.exited && f.state == State::kBarrier) hopeless("divergent-barrier", line, f, "this thread waits at another __syncthreads");
    }
  if (b.named[0].threads) {
    report("divergent-barrier", 0, 0, PC, line, 0, kNobody, "__syncthreads in a block that uses its barrier by the number 0");
    abandon();
  }
  b.barrier_line = line;
  if (reduce == 1) b.votes |= predicate != 0;
  if (reduce == 2) b.votes = b.arrived ? b.votes & (predicate != 0) : predicate != 0;
  if (reduce == 3) b.votes += predicate != 0;
  b.warps[me.warp].at_barrier |= 1u << me.lane;
  me.state = State::kBarrier;
  me.line = line;
  if (++b.arrived == b.fibers.size()) complete_barrier(b);
  switch_out();
  return b.barrier_result;
}

static void whole_warp(int kind, u64 operands, int line);

HOOK void emu_named_barrier(int number, int threads, bool wait, int line) {
  Fiber& me = *machine->current;
  const Block& own = *me.block;
  if (number == 0 && (own.arrived || own.epoch != own.first)) {
    report("divergent-barrier", 0, 0, PC, line, 0, kNobody, "named barrier 0 is that of __syncthreads, which this block uses");
    abandon();
  }
  if (number < 0 || number > 15 || threads <= 0 || threads % 32 || static_cast<u32>(threads) > machine->threads) {
    report("divergent-barrier", 0, 0, PC, line, 0, kNobody,
           "named barrier %d of %d threads: numbers are 0 to 15, and threads whole warps of the block's %u", number, threads,
           machine->threads);
    abandon();
  }
  whole_warp(kNamedBarrier, static_cast<u64>(threads) << 5 | (wait ? 16u : 0u) | static_cast<u32>(number), line);
  if (!wait) return;
  const auto phase = static_cast<u32>(me.result);
  if (me.block->named[number].phase != phase) return;
  me.state = State::kNamed;
  me.line = line;
  switch_out();
}

HOOK u64 emu_warp(int kind, unsigned mask, u64 value, unsigned source, int line) {
  Fiber& me = *machine->current;
  Block& b = *me.block;
  Warp& w = b.warps[me.warp];
  mask &= w.exists;
  if (!(mask >> me.lane & 1)) {
    report("warp-mask", 0, 0, nullptr, line, 0, kNobody, "lane %u takes part in a warp operation whose mask 0x%08x leaves it out",
           me.lane, mask);
    abandon();
  }
  if (const u32 missing = mask & (w.done | w.at_barrier))
    hopeless("warp-divergence", line, b.fibers[me.warp * 32 + static_cast<u32>(__builtin_ctz(missing))],
             "the mask of this warp operation names a lane that cannot take part");
  me.kind = kind;
  me.mask = mask;
  me.value = value;
  me.source = source;
  me.line = line;
  me.result = 0;
  me.state = State::kWarp;
  w.waiting |= 1u << me.lane;
  if ((w.waiting & mask) == mask) {
    bool all = true;
    for (u32 m = mask; m; m &= m - 1) {
      const Fiber& f = b.fibers[me.warp * 32 + static_cast<u32>(__builtin_ctz(m))];
      all &= f.kind == kind && f.mask == mask && f.line == line;
    }
    if (all) {
      finish_warp_operation(b, me.warp * 32, mask);
      return me.result;
    }
  }
  switch_out();
  return me.result;
}

// The mask of a tensor-core instruction is the whole warp.
static void whole_warp(int kind, u64 operands, int line) {
  const Fiber& me = *machine->current;
  if (const u32 exists = me.block->warps[me.warp].exists; exists != ~0u) {
    report("warp-mask", 0, 0, nullptr, line, 0, kNobody, "mma, ldmatrix and named barriers take all 32 lanes of a warp, and warp %u has the lanes 0x%08x",
           me.warp, exists);
    abandon();
  }
  emu_warp(kind, ~0u, operands, me.lane, line);
}

HOOK void emu_mma(int kind, float* d, const u32* a, u32 b0, u32 b1, int line) {
  MmaOperands mine{d, a, {b0, b1}};
  whole_warp(kind, reinterpret_cast<u64>(&mine), line);
}

HOOK void emu_load_matrices(int kind, u32* result, const void* row, int line) {
  const auto a = reinterpret_cast<uptr>(row);
  const uptr s = a - reinterpret_cast<uptr>(shared_memory);
  if (s >= kSharedMax || s + 16 > hot.shared_bytes) {
    beyond_shared(a, 16, PC, false);
    abandon();
  }
  if (a % 16) bad_alignment(a, 16, PC);
  MatrixRow mine{a, result, {}};
  whole_warp(kind, reinterpret_cast<u64>(&mine), line);
  for (uptr word : mine.reads) access<4, false>(word, PC);
}

HOOK void emu_fence(int) {
  Fiber& me = *machine->current;
  if (!me.pending.empty()) {
    merge(me.acquired, me.pending);
    me.pending.clear();
  }
  me.fenced = publish();
}

HOOK u64 emu_atomic_load(void* p, unsigned n) {
  const auto a = reinterpret_cast<uptr>(p);
  access_atomic<false>(a, n, PC);
  access_atomic<true>(a, n, PC);
  relaxed_read(a);
  u64 v = 0;
  std::memcpy(&v, p, n);
  return v;
}
HOOK void emu_atomic_store(void* p, unsigned n, u64 value) {
  --hot.writes;  // the load counted one; only a change is progress
  relaxed_write(reinterpret_cast<uptr>(p), true);
  if (std::memcmp(p, &value, n) == 0) return emu_yield();
  ++hot.writes;
  std::memcpy(p, &value, n);
}

HOOK unsigned emu_ld_acquire(const unsigned* p) {
  const auto a = reinterpret_cast<uptr>(p);
  access_atomic<false>(a, 4, PC);
  if (auto it = machine->published.find(a); it != machine->published.end()) merge(machine->current->acquired, it->second);
  unsigned v;
  std::memcpy(&v, p, 4);
  return v;
}
HOOK void emu_st_release(unsigned* p, unsigned value) {
  const auto a = reinterpret_cast<uptr>(p);
  access_atomic<true>(a, 4, PC);
  machine->published[a] = publish();
  std::memcpy(p, &value, 4);
}

HOOK void emu_cp_async(void* to, const void* from, int n) {
  issue_copy(reinterpret_cast<uptr>(to), reinterpret_cast<uptr>(from), static_cast<u32>(n), static_cast<u32>(n), PC);
}
HOOK void emu_cp_async_zfill(void* to, const void* from, int n, int source_bytes) {
  issue_copy(reinterpret_cast<uptr>(to), reinterpret_cast<uptr>(from), static_cast<u32>(n), static_cast<u32>(source_bytes), PC);
}
HOOK void emu_cp_async_commit() { ++machine->current->groups; }
HOOK void emu_cp_async_wait_group(int n) {
  const u32 groups = machine->current->groups;
  if (groups > static_cast<u32>(n)) wait_copies(groups - static_cast<u32>(n));
}
HOOK void emu_cp_async_wait_all() { wait_copies(~0u); }

// ------------------------------------------------------------------------------------------------ interface of Python

EXPORT void emu_close() {
  if (!machine) return;
  for (Mapping* m : {&machine->arena, &machine->state, &machine->cells, &machine->byte_cells, &machine->stacks,
                     &machine->shared_cells, &machine->stamps})
    m->release();
  delete machine;
  machine = nullptr;
  hot = Hot{};
  many_blocks.clear();
  in_use.unlock();
}

// Reserves `regions` guarded regions; writable ones must come first. region i has bytes[i] bytes at an address that is
// residues[i] modulo 256. Fills addresses. Returns 0, or -1 if the address space refused. emu_close must follow.
EXPORT int emu_open(u32 regions, const u64* bytes, const u64* residues, const u8* writable, u64* addresses) {
  in_use.lock();
  machine = new Machine;
  Machine& m = *machine;
  hot = Hot{};
  u64 end = kGranule, tracked = kGranule;
  for (u32 i = 0; i < regions; ++i) {
    m.regions.push_back({end + kGuard + residues[i], bytes[i]});
    end += (kGuard + residues[i] + bytes[i] + kGuard + kGranule - 1) / kGranule * kGranule;
    if (writable[i]) tracked = end;
  }
  end += kGranule;
  if (!m.arena.reserve(end) || !m.state.reserve(end / 2 + 64) || !m.cells.reserve(tracked * 8) || !m.byte_cells.reserve(tracked * 32))
    return -1;
  hot.arena_low = reinterpret_cast<uptr>(m.arena.low);
  hot.arena_bytes = end;
  hot.tracked_bytes = tracked;
  hot.state = reinterpret_cast<u16*>(m.state.low);
  hot.cells = reinterpret_cast<Cell*>(m.cells.low);
  hot.byte_cells = reinterpret_cast<Cell*>(m.byte_cells.low);
  for (u32 i = 0; i < regions; ++i) addresses[i] = hot.arena_low + m.regions[i].low;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void*) {
        const auto self = reinterpret_cast<uptr>(&emu_switch);
        std::vector<std::pair<uptr, uptr>> loaded;
        bool mine = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& h = info->dlpi_phdr[i];
          if (h.p_type != PT_LOAD) continue;
          loaded.emplace_back(info->dlpi_addr + h.p_vaddr, info->dlpi_addr + h.p_vaddr + h.p_memsz);
          mine |= self >= loaded.back().first && self < loaded.back().second;
        }
        if (mine) machine->own_segments = loaded;
        return mine ? 1 : 0;
      },
      nullptr);
  return 0;
}

// Visits the elements of a strided array, in runs of `run` contiguous bytes: dims outer dimensions of shape[] and strides[]
// (bytes). `address` is element 0 in the arena, `host` the same in the caller's array.
//   0 mark: the bytes are accessible, and if flags & 1 writable, if flags & 2 uninitialised (and filled with 0xff)
//   1 copy in: from host to the arena
//   2 copy out: the bytes that were written, from the arena to host
//   3 unwritten: returns how many bytes were never written; *first is the offset of the first of them from element 0
EXPORT u64 emu_elements(int operation, u64 address, u64 host, u64 run, u32 dims, const u64* shape, const u64* strides,
                        u32 flags, u64* first) {
  std::vector<u64> at(dims, 0);
  u64 offset = 0, count = 0;
  auto bit = [](u64 o) { return static_cast<u16>(1u << (o & 3)); };
  for (u32 d = 0; d < dims; ++d)
    if (shape[d] == 0) return 0;
  for (;;) {
    const u64 begin = address - hot.arena_low + offset, end = begin + run;
    auto* here = reinterpret_cast<u8*>(hot.arena_low + begin);
    auto* there = reinterpret_cast<u8*>(host + offset);
    if (operation == 0) {
      const u16 set = static_cast<u16>(1u | (flags & 1 ? 0x1000u : 0u) | (flags & 2 ? 0x10u : 0u));
      u64 o = begin;
      for (; o < end && (o & 3); ++o) hot.state[o >> 2] |= static_cast<u16>(set << (o & 3));
      for (; o + 4 <= end; o += 4) hot.state[o >> 2] |= static_cast<u16>(set * 15u);
      for (; o < end; ++o) hot.state[o >> 2] |= static_cast<u16>(set << (o & 3));
      if (flags & 2) std::memset(here, 0xff, run);
    } else if (operation == 1) {
      std::memcpy(here, there, run);
    } else {
      for (u64 o = begin; o < end;) {
        const u16 s = hot.state[o >> 2];
        const u64 step = (o & 3) == 0 && o + 4 <= end && ((s & kWritten) == kWritten || !(s & kWritten)) ? 4 : 1;
        const bool written = s & static_cast<u16>(bit(o) << 8);
        if (operation == 2 && written) std::memcpy(there + (o - begin), here + (o - begin), step);
        if (operation == 3 && !written) {
          if (count == 0) *first = offset + (o - begin);
          count += step;
        }
        o += step;
      }
    }
    u32 d = dims;
    while (d > 0) {
      --d;
      offset += strides[d];
      if (++at[d] < shape[d]) break;
      offset -= strides[d] * shape[d];
      at[d] = 0;
      if (d == 0) return count;
    }
    if (dims == 0) return count;
  }
}

// Runs one launch to its end or to the first fatal finding. Returns 0; -1 if memory ran out; -2 if an argument is out of
// range. Findings accumulate over launches.
EXPORT int emu_launch(void (*entry)(), const u8* arguments, u32 argument_bytes, const u32* grid, const u32* block,
                      u32 shared_bytes, u64 seed, u32 resident, int shuffled) {
  Machine& m = *machine;
  const u64 blocks = u64{grid[0]} * grid[1] * grid[2], threads = u64{block[0]} * block[1] * block[2];
  if (argument_bytes <= 16 || argument_bytes > sizeof(Arguments) || shared_bytes > kSharedMax || threads == 0 ||
      threads > 1024 || blocks > 0x7fffffffu || resident == 0)
    return -2;
  if (blocks == 0) return 0;
  m.entry = entry;
  m.arguments.assign(arguments, arguments + argument_bytes);
  m.grid_dim = {grid[0], grid[1], grid[2]};
  m.block_dim = {block[0], block[1], block[2]};
  m.threads = static_cast<u32>(threads);
  m.shared_bytes = hot.shared_bytes = shared_bytes;
  m.random = seed;
  m.aborted = false;
  m.entered = nullptr;
  m.published.clear();
  many_blocks.clear();
  hot.launch_first = ++m.last_epoch;
  const u64 slots = std::min<u64>(resident, blocks), words = shared_bytes / 4 + 2;
  const u64 stack = kStackBytes + kStackGuard;
  const u64 warps = (threads + 31) / 32;
  if (!m.stacks.reserve(slots * threads * stack) || !m.shared_cells.reserve(slots * words * 5 * sizeof(Cell)) ||
      !m.stamps.reserve(slots * warps * words * 8))
    return -1;
  m.slots.clear();
  for (u64 i = 0; i < slots; ++i) {
    auto b = std::make_unique<Block>();
    b->fibers.resize(threads);
    b->warps.resize(warps);
    b->shared.resize(shared_bytes);
    b->cells = reinterpret_cast<Cell*>(m.shared_cells.low) + i * words * 5;
    b->byte_cells = b->cells + words;
    b->stamps = reinterpret_cast<u64*>(m.stamps.low) + i * warps * words;
    for (u64 t = 0; t < threads; ++t) {
      char* low = m.stacks.low + (i * threads + t) * stack;
      if (mprotect(low, kStackGuard, PROT_NONE) != 0) return -1;
      b->fibers[t].stack = low + kStackGuard;
    }
    m.slots.push_back(std::move(b));
  }
  run_blocks(blocks, shuffled != 0);
  m.current = nullptr;
  m.slots.clear();
  return 0;
}

// Copies up to `room` findings out; returns how many there are, repeats of one place included in *total.
EXPORT u32 emu_findings(Finding* out, u32 room, u64* total) {
  const u32 n = static_cast<u32>(std::min<std::size_t>(room, machine->findings.size()));
  std::copy_n(machine->findings.begin(), n, out);
  *total = machine->findings_total;
  return n;
}

EXPORT void emu_counts(u64* threads, u64* switches, u64* accesses) {
  *threads = machine->count_threads;
  *switches = machine->count_switches;
  *accesses = machine->count_accesses;
}

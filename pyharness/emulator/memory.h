// What the emulator knows of memory: which bytes a kernel may touch, which were written, and who touched them last.
//
// Global buffers live in one reserved arena, so that an address is classified by subtraction. Every 4-byte word of it has
//   - a state: 4 bits each (one a byte) for accessible, uninitialised, written, writable. Zero, the state of a page
//     nobody touched, is "not accessible": guard zones and the gaps of strided views cost nothing, whatever their size;
//   - a cell, if it may be written: who wrote and who read it last, for race detection.
// Shared memory has cells only; a word counts as written if it was written since its block began.
//
// Races. Time within a block is cut at __syncthreads: each interval of each block has its own number, the epoch, drawn from
// one counter for the whole run, so that a cell of an earlier launch or block is recognised by its epoch alone. Within an
// epoch, threads of one warp are ordered by __syncwarp (a clock a lane and a matrix of what each lane has synchronised
// with); threads of different warps by named barriers (a warp has heard of each other warp up to some clock of that one),
// and by nothing else: shuffles and ballots do not order memory. Different blocks are ordered only by
// release/acquire: emu_st_release and emu_ld_acquire, or __threadfence on both sides of a relaxed atomic or volatile
// access. Limits: a cell keeps one writer and, for the readers of one epoch, the lanes of one warp (more warps are a
// flag, and for shared memory a stamp a warp; readers of earlier blocks go to a side table), so of several conflicts on
// one word one is reported; a release to other blocks does not say what its warp has heard at named barriers; if a
// block releases twice within one epoch from different warps to the same word, only the later release is kept.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <unordered_map>
#include <vector>

#define EMU_INLINE inline __attribute__((always_inline))
#define EMU_SLOW __attribute__((noinline, cold))
#define EMU_LIKELY(x) __builtin_expect(!!(x), 1)
#define EMU_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace emu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using uptr = std::uintptr_t;

constexpr u32 kSharedMax = 232448;    // 227 KiB, the largest a block may ask for on any target
constexpr u32 kSharedGuard = 4096;
constexpr u64 kGranule = 65536;       // regions of the arena start on multiples of this
constexpr u64 kGuard = 4096;          // at least this much around each region (multiple of 256)

// ---- state of a word of the arena
constexpr u16 kAccessible = 0x000f, kUninitialised = 0x00f0, kWritten = 0x0f00, kWritable = 0xf000;

// ---- who touched a word last
constexpr u32 kClockBits = 20, kClockMask = (1u << kClockBits) - 1;
constexpr u32 kStampLaneBits = 6, kManyLanes = 32;  // a stamp's lane, and that several lanes read
constexpr u32 kWriteAtomic = 1u << 30;                          // w_who: thread (10 bits) << 20 | clock
constexpr u32 kManyWarps = 1u << 27, kManyBlocks = 1u << 28, kReadAtomic = 1u << 29;  // r_who: warp (5 bits) << 20 | clock
constexpr u32 kSplit = 1, kInFlight = 2;

struct Cell {
  u32 w_epoch, w_block, w_who;
  u32 r_epoch, r_block, r_mask, r_who;
  u32 flags;  // kSplit: the four cells of its bytes are the truth; kInFlight: destination of an unfinished copy
};
static_assert(sizeof(Cell) == 32);

// All accesses of a block that are known to have happened: those of earlier epochs, and within `epoch` those of the
// lanes of `warp` with a clock below known[lane].
struct Release {
  u32 epoch, warp;
  u32 known[32];
};
using Clock = std::map<u32, Release>;  // by block

inline void merge(Clock& into, const Clock& from) {
  for (const auto& [block, r] : from) {
    auto [it, fresh] = into.try_emplace(block, r);
    if (fresh) continue;
    Release& mine = it->second;
    if (r.epoch > mine.epoch || (r.epoch == mine.epoch && r.warp != mine.warp)) mine = r;
    else if (r.epoch == mine.epoch)
      for (int i = 0; i < 32; ++i) mine.known[i] = mine.known[i] > r.known[i] ? mine.known[i] : r.known[i];
  }
}

struct Reader {
  u32 epoch, block, mask, who;
};

// What the hooks need of the running thread, block and launch; the scheduler fills it at every switch.
struct Hot {
  uptr stack_low;
  uptr stack_bytes;
  std::int64_t budget;        // accesses left until this thread is called a runaway
  uptr arena_low;
  u64 arena_bytes, tracked_bytes;  // the writable regions come first: only they have cells
  u16* state;
  Cell* cells;
  Cell* byte_cells;
  Cell* shared_cells;
  Cell* shared_byte_cells;
  u32 shared_bytes;
  u64* stamps;                // of the running warp: when it last read each word of shared memory
  u64 stamp;                  // epoch, lane, clock, now
  u64 word;                   // of shared memory that is being accessed, kNoWord: of global memory
  u32 epoch, block, block_first, launch_first;
  u32 lane_bit, w_who, r_who;
  u64 writes;
};

constexpr u64 kNoWord = ~u64{0};

extern Hot hot;

inline std::unordered_map<const Cell*, std::vector<Reader>> many_blocks;  // the readers that a cell has no room for

// Defined by the scheduler.
bool ordered_before_me(u32 epoch, u32 block, u32 thread, u32 clock);
bool readers_ordered_before_me(const Reader& r);

enum class Mode { kPlain, kAtomic };

// The conflict that an access would be: nullptr, or its name; *other becomes the other thread, *other_block its block.
EMU_SLOW inline const char* write_conflict(const Cell& c, u32 first, Mode mode, u32* other, u32* other_block) {
  if (c.w_epoch < first || (mode == Mode::kAtomic && (c.w_who & kWriteAtomic))) return nullptr;
  const u32 thread = c.w_who >> kClockBits & 1023u;
  if (ordered_before_me(c.w_epoch, c.w_block, thread, c.w_who & kClockMask)) return nullptr;
  *other = thread;
  *other_block = c.w_block;
  return "written";
}
EMU_SLOW inline const char* read_conflict(const Cell& c, u32 first, Mode mode, u32* other, u32* other_block) {
  if (c.r_epoch < first) return nullptr;
  auto check = [&](const Reader& r) {
    if (mode == Mode::kAtomic && (r.who & kReadAtomic)) return false;
    if (readers_ordered_before_me(r)) return false;
    u32 lanes = r.mask;
    if (r.epoch == hot.epoch && (r.who >> kClockBits & 31u) == (hot.r_who >> kClockBits & 31u)) lanes &= ~hot.lane_bit;
    *other = (r.who >> kClockBits & 31u) * 32u + (lanes ? (u32)__builtin_ctz(lanes) : 0u);
    *other_block = r.block;
    return true;
  };
  if (check({c.r_epoch, c.r_block, c.r_mask, c.r_who})) return "read";
  if (c.r_who & kManyBlocks)
    if (auto it = many_blocks.find(&c); it != many_blocks.end())
      for (const Reader& r : it->second)
        if (r.epoch >= first && check(r)) return "read";
  return nullptr;
}

EMU_SLOW inline void keep_reader(Cell& c) {
  auto& kept = many_blocks[&c];
  for (Reader& r : kept)
    if (r.block == c.r_block) {
      if (r.epoch < c.r_epoch) r = {c.r_epoch, c.r_block, c.r_mask, c.r_who};
      return;
    }
  kept.push_back({c.r_epoch, c.r_block, c.r_mask, c.r_who});
}

// Notes a read by the running thread. `first`: the epoch below which cells are history.
EMU_INLINE void note_read(Cell& c, u32 first, u32 atomic) {
  const u32 mine = hot.r_who | atomic;
  if (EMU_LIKELY(c.r_epoch == hot.epoch)) {
    if ((c.r_mask & hot.lane_bit) && c.r_who == mine) return;
    if (((c.r_who ^ mine) & (31u << kClockBits)) != 0) {
      c.r_who |= kManyWarps;
    } else if (((c.r_who ^ mine) & kClockMask) != 0) {
      // Another clock: if all earlier readers are ordered before this thread, it can stand for them.
      const u32 keep = c.r_who & (kManyWarps | kManyBlocks);
      const u32 later = (c.r_who & kClockMask) > (mine & kClockMask) ? c.r_who : mine;
      if (!keep && readers_ordered_before_me({c.r_epoch, c.r_block, c.r_mask & ~hot.lane_bit, c.r_who})) {
        c.r_mask = hot.lane_bit;
        c.r_who = mine;
        return;
      }
      c.r_who = (c.r_who & ~kClockMask) | (later & kClockMask);
    }
    c.r_mask |= hot.lane_bit;
    if (!atomic) c.r_who &= ~kReadAtomic;
    return;
  }
  u32 many = 0;
  if (EMU_UNLIKELY(c.r_epoch >= first)) {
    many = c.r_who & kManyBlocks;
    if (c.r_block != hot.block) {
      keep_reader(c);
      many = kManyBlocks;
    }
  }
  c.r_epoch = hot.epoch;
  c.r_block = hot.block;
  c.r_mask = hot.lane_bit;
  c.r_who = mine | many;
}

EMU_INLINE void note_write(Cell& c, u32 atomic) {
  c.w_epoch = hot.epoch;
  c.w_block = hot.block;
  c.w_who = hot.w_who | atomic;
}

// True if nothing but this thread can conflict: decided without a call.
EMU_INLINE bool quiet_writer(const Cell& c, u32 first) {
  if (c.w_epoch < first) return true;
  if (c.w_epoch == hot.epoch) return ((c.w_who ^ hot.w_who) & (1023u << kClockBits)) == 0;
  return c.w_block == hot.block;
}
EMU_INLINE bool quiet_readers(const Cell& c, u32 first) {
  if (c.r_epoch < first) return true;
  if (c.r_who & (kManyBlocks | kManyWarps)) return false;
  if (c.r_epoch == hot.epoch)
    return c.r_mask == hot.lane_bit && ((c.r_who ^ hot.r_who) & (31u << kClockBits)) == 0;
  return c.r_block == hot.block;
}

}  // namespace emu

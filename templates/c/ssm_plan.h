// SPDX-License-Identifier: Apache-2.0
//
// Plans: how many blocks, threads, bytes of shared memory and of workspace a kernel takes, from what its manifest row
// says. C99 and C++11, no CUDA. A grid rule is one function here, one in Go and one in Python, of the same name.

#ifndef SSM_PLAN_H
#define SSM_PLAN_H

#include <stdint.h>
#include <string.h>

enum { SSM_MAX_INTEGERS = 12, SSM_MAX_LAUNCHES = 8 };

// The sizes of a problem: upper bounds where a plan serves smaller batches. longest is the tokens of the longest
// sequence that is not padding, or -1 where it is not known.
typedef struct {
  int32_t tokens, sequences, heads, head_dim, groups, d_state, longest;
  int32_t per_column_a;     // whether A has a value for each column
  int32_t checkpoint_step;  // divides every number of tokens behind which a state is stored before the end; 0: none is
} ssm_geometry;

// A grid rule and its integers.
typedef struct {
  const char* rule;
  struct {
    const char* name;
    int64_t value;
  } integers[SSM_MAX_INTEGERS];
} ssm_grid;

// One launch: number of the entry among the kernel's, grid and block in blocks and threads, dynamic shared bytes, and
// whether it may start before the launch before it has ended: each of its blocks waits itself for that.
typedef struct {
  int32_t entry;
  uint32_t grid[3], block[3], shared_bytes;
  int32_t overlaps;
} ssm_shape;

// How a kernel runs a geometry and everything smaller. lanes, rows and chunk go into ScanArgs.
typedef struct {
  int32_t count;
  ssm_shape launches[SSM_MAX_LAUNCHES];
  int64_t workspace_bytes;
  int32_t lanes, rows, chunk;
} ssm_plan;

static inline int64_t ssm_integer(const ssm_grid* grid, const char* name) {
  for (int i = 0; i < SSM_MAX_INTEGERS && grid->integers[i].name != NULL; i++) {
    if (strcmp(grid->integers[i].name, name) == 0) return grid->integers[i].value;
  }
  return 0;
}

static inline int64_t ssm_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A block a (sequence, head, run of rows), at least one sequence's. Kernels stride over what is left at the limit.
static inline void ssm_rows_grid(const ssm_geometry* g, int64_t rows, uint32_t grid[3]) {
  const int64_t limit = INT32_MAX, runs = ssm_ceil_div(g->head_dim, rows);
  const int64_t blocks = (int64_t)(g->sequences > 1 ? g->sequences : 1) * g->heads;  // below 2^62
  grid[0] = (uint32_t)(runs > 0 && blocks > limit / runs ? limit : blocks * runs);
  grid[1] = grid[2] = 1;
}

static inline int ssm_one_launch(ssm_plan* plan, const ssm_geometry* g, int64_t rows, int64_t threads, int64_t shared) {
  ssm_shape* launch = &plan->launches[0];
  plan->count = 1;
  ssm_rows_grid(g, rows, launch->grid);
  launch->block[0] = (uint32_t)threads;
  launch->block[1] = launch->block[2] = 1;
  launch->shared_bytes = (uint32_t)shared;
  return 0;
}

// The rule "rows": one launch of a block a (sequence, head, run of `rows` rows).
static inline int ssm_rows_plan(const ssm_grid* grid, int32_t threads, int32_t shared, const ssm_geometry* g,
                                ssm_plan* plan) {
  const int64_t rows = ssm_integer(grid, "rows");
  return rows < 1 ? -1 : ssm_one_launch(plan, g, rows, threads, shared);
}

// The rule "padded_rows": ssm_rows_plan with lanes, rows, chunk and shared memory found from d_state at run time. The
// lanes of a row are the power of two that covers d_state at `columns` a lane, at most 32; a block has `threads`
// threads and at most `rows` rows; a chunk is what fits `staging_bytes`, at most `chunk` tokens. A token is B and C,
// padded by 4 floats per 32, the block's rows of x, and dt.
static inline int ssm_padded_rows_plan(const ssm_grid* grid, const ssm_geometry* g, ssm_plan* plan) {
  const int64_t columns = ssm_integer(grid, "columns"), threads = ssm_integer(grid, "threads");
  const int64_t most_rows = ssm_integer(grid, "rows"), most_chunk = ssm_integer(grid, "chunk");
  const int64_t staging = ssm_integer(grid, "staging_bytes");
  if (columns < 1 || threads < 1 || most_rows < 1 || most_chunk < 1 || staging < 1) return -1;
  const int64_t n = g->d_state > 1 ? g->d_state : 1;
  int64_t lanes = 1;
  while (lanes < 32 && lanes * columns < n) lanes *= 2;
  int64_t rows = threads / lanes < most_rows ? threads / lanes : most_rows;
  if (rows < 1) rows = 1;
  const int64_t held = 4 * ssm_ceil_div(n, 4 * lanes) * lanes;
  const int64_t token_bytes = 4 * (2 * (held + 4 * ssm_ceil_div(held, 32)) + rows + 1);
  int64_t chunk = staging / token_bytes < most_chunk ? staging / token_bytes : most_chunk;
  if (chunk < 1) chunk = 1;
  plan->lanes = (int32_t)lanes;
  plan->rows = (int32_t)rows;
  plan->chunk = (int32_t)chunk;
  return ssm_one_launch(plan, g, rows, rows * lanes, ssm_ceil_div(chunk * token_bytes, 16) * 16);
}

// The runs of heads of one group: a block has one of them.
static inline int64_t ssm_head_runs(const ssm_geometry* g, int64_t heads) {
  return g->groups * ssm_ceil_div(g->heads / (g->groups > 1 ? g->groups : 1), heads);
}

// The rule "channels", for head_dim 1: a block a run of `rows` channels of one group and `sequences` sequences.
static inline int ssm_channels_plan(const ssm_grid* grid, int32_t threads, int32_t shared, const ssm_geometry* g,
                                    ssm_plan* plan) {
  const int64_t rows = ssm_integer(grid, "rows"), sequences = ssm_integer(grid, "sequences"), limit = INT32_MAX;
  if (rows < 1 || sequences < 1) return -1;
  int64_t runs = ssm_head_runs(g, rows);
  if (runs < 1) runs = 1;
  const int64_t shares = ssm_ceil_div(g->sequences > 1 ? g->sequences : 1, sequences);
  ssm_one_launch(plan, g, 1, threads, shared);
  plan->launches[0].grid[0] = (uint32_t)(runs * (shares < limit / runs ? shares : limit / runs));
  return 0;
}

static inline int ssm_segments_launch(ssm_plan* plan, int32_t entry, int64_t blocks, int64_t threads, int32_t shared) {
  ssm_shape* launch = &plan->launches[plan->count++];
  launch->entry = entry;
  launch->grid[0] = (uint32_t)(blocks < INT32_MAX ? blocks : INT32_MAX);
  launch->block[0] = (uint32_t)threads;
  launch->grid[1] = launch->grid[2] = launch->block[1] = launch->block[2] = 1;
  launch->shared_bytes = (uint32_t)shared;
  return 0;
}

// The rule "segments": sequences are cut in `segments` of whole chunks, a block a (sequence, segment, run of `heads`
// heads of one group, or of parts of heads where each has `parts_of_head`). With several segments the entry that ends
// in _gather comes first, on all segments but one, each cut again in `gather_cuts` where they are named, with
// `gather_shared` bytes of shared memory where they are named, and stores what the states become over each; then _walk
// runs all segments, and may start before _gather has ended where `overlaps` is 1. Entries are in alphabetical order,
// so with two entries 0 is _gather and 1 is _walk. The workspace is `state_bytes` for each head of each cut that the
// tokens can fill.
static inline int ssm_segments_plan(const ssm_grid* grid, int32_t threads, int32_t shared, const ssm_geometry* g,
                                    ssm_plan* plan) {
  const int64_t heads = ssm_integer(grid, "heads"), chunk = ssm_integer(grid, "chunk");
  const int64_t segments = ssm_integer(grid, "segments"), state_bytes = ssm_integer(grid, "state_bytes");
  const int64_t gather_shared = ssm_integer(grid, "gather_shared"), named = ssm_integer(grid, "gather_cuts");
  const int64_t parts = ssm_integer(grid, "parts_of_head"), cuts = named > 1 ? named : 1;
  ssm_geometry walked = *g;
  if (parts > 1) walked.heads *= (int32_t)parts;
  if (heads < 1 || chunk < 1 || segments < 1 || state_bytes < 1) return -1;
  const int64_t blocks = (g->sequences > 1 ? g->sequences : 1) * ssm_head_runs(&walked, heads);
  if (segments == 1) return ssm_segments_launch(plan, 0, blocks, threads, shared);
  const int64_t all = g->sequences * segments * cuts, filled = g->tokens / chunk + g->sequences;
  plan->workspace_bytes = (all < filled ? all : filled) * g->heads * state_bytes;
  ssm_segments_launch(plan, 0, blocks * (segments - 1) * cuts, threads,
                      gather_shared > 0 ? (int32_t)gather_shared : shared);
  ssm_segments_launch(plan, 1, blocks * segments, threads, shared);
  plan->launches[1].overlaps = ssm_integer(grid, "overlaps") != 0;
  return 0;
}

// Finds the plan of a kernel from its grid rule, the threads of a block and its dynamic shared bytes: 0, or -1 where
// the rule is not known here or its integers are wrong.
static inline int ssm_make_plan(const ssm_grid* grid, int32_t threads, int32_t shared, const ssm_geometry* g,
                                ssm_plan* plan) {
  memset(plan, 0, sizeof *plan);
  if (strcmp(grid->rule, "rows") == 0) return ssm_rows_plan(grid, threads, shared, g, plan);
  if (strcmp(grid->rule, "padded_rows") == 0) return ssm_padded_rows_plan(grid, g, plan);
  if (strcmp(grid->rule, "channels") == 0) return ssm_channels_plan(grid, threads, shared, g, plan);
  if (strcmp(grid->rule, "segments") == 0) return ssm_segments_plan(grid, threads, shared, g, plan);
  return -1;
}

// The bit of ScanArgs.flags by which a kernel may use 16-byte accesses to an array: its base, its outer stride and its
// inner rows are multiples of 16 bytes; stride and row are in elements.
static inline uint32_t ssm_vector_flag(uint32_t flag, uint64_t address, int64_t stride, int64_t row, int bytes) {
  return address != 0 && address % 16 == 0 && stride * bytes % 16 == 0 && row * bytes % 16 == 0 ? flag : 0;
}

static inline int ssm_bytes(const char* dtype) {
  return strcmp(dtype, "f32") == 0 ? 4 : strcmp(dtype, "i8") == 0 ? 1 : 2;
}

#endif  // SSM_PLAN_H

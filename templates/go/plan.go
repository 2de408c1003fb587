package ssmscan

import (
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// Geometry is the sizes of a problem that decide a launch: upper bounds where a plan serves smaller batches. Longest is
// the tokens of the longest sequence that is not padding, or -1 where it is not known.
type Geometry struct {
	Tokens    int32 `json:"tokens"`
	Sequences int32 `json:"sequences"`
	Heads     int32 `json:"heads"`
	HeadDim   int32 `json:"head_dim"`
	Groups    int32 `json:"groups"`
	DState    int32 `json:"d_state"`
	Longest   int32 `json:"longest"`

	PerColumnA bool `json:"per_column_a"` // A has a value for each column
	// CheckpointStep divides every number of tokens behind which, before a sequence's end, a state is stored; 0: none is.
	CheckpointStep int32 `json:"checkpoint_step"`
}

// longest is Longest, or the average length, rounded up, where that is not known.
func (g Geometry) longest() int64 {
	if g.Longest >= 0 {
		return int64(g.Longest)
	}
	return ceilDiv(int64(g.Tokens), int64(max(g.Sequences, 1)))
}

// size is the value of a size that a manifest row may limit, by its name there.
func (g Geometry) size(name string) (int64, bool) {
	switch name {
	case "d_state":
		return int64(g.DState), true
	case "head_dim":
		return int64(g.HeadDim), true
	case "heads":
		return int64(g.Heads), true
	case "groups":
		return int64(g.Groups), true
	case "longest":
		return g.longest(), true
	case "per_column_a":
		if g.PerColumnA {
			return 1, true
		}
		return 0, true
	case "checkpoint_step":
		return int64(g.CheckpointStep), true
	}
	return 0, false
}

// Launch is one kernel launch: the number of its entry in Row.Entries, grid and block in blocks and threads, dynamic
// shared memory in bytes, and whether it may start before the launch before it has ended: each of its blocks waits itself
// for that.
type Launch struct {
	Entry       int
	Grid, Block [3]uint32
	SharedBytes uint32
	Overlaps    bool
}

// KernelPlan is how one kernel runs a geometry and everything smaller: launches in order, bytes of workspace, and the
// values of ScanArgs.Lanes, Rows and Chunk, which are 0 where the kernel was compiled for them.
type KernelPlan struct {
	Launches           []Launch
	WorkspaceBytes     int64
	Lanes, Rows, Chunk int32
}

// GridRule names how a kernel's plan is found, with the integers of the rule.
type GridRule struct {
	Rule     string
	Integers map[string]int64
}

// UnmarshalJSON reads the rule of a manifest row, one object of the name and the integers; anything else in it is for
// readers of the manifest.
func (g *GridRule) UnmarshalJSON(text []byte) error {
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	g.Integers = map[string]int64{}
	for name, value := range fields {
		switch value := value.(type) {
		case string:
			if name == "rule" {
				g.Rule = value
			}
		case float64:
			if value != math.Trunc(value) {
				return fmt.Errorf("grid rule: want an integer %s, have %v", name, value)
			}
			g.Integers[name] = int64(value)
		}
	}
	return nil
}

// launchable is what a rule knows of a kernel besides its integers.
type launchable struct {
	entries     []string
	threads     uint32
	sharedBytes uint32
}

// planRules holds a function for each grid rule, of the names that pyharness/plans.py has.
var planRules = map[string]func(map[string]int64, launchable, Geometry) (KernelPlan, error){
	"rows":        rowsPlan,
	"padded_rows": paddedRowsPlan,
	"channels":    channelsPlan,
	"segments":    segmentsPlan,
}

// Plan finds the launches of a kernel's image for upper bounds.
func (r *Row) Plan(target string, g Geometry) (KernelPlan, error) {
	rule, ok := planRules[r.Grid.Rule]
	if !ok {
		return KernelPlan{}, &ImageError{r.ID, "grid rule", "one that this package knows", strconv.Quote(r.Grid.Rule)}
	}
	image, ok := r.Targets[target]
	if !ok {
		return KernelPlan{}, r.noTarget(target)
	}
	plan, err := rule(r.Grid.Integers, launchable{r.Entries, uint32(r.Block), uint32(image.DynamicShared)}, g)
	if err != nil {
		return KernelPlan{}, &ImageError{r.ID, "grid rule " + r.Grid.Rule, "its integers", err.Error()}
	}
	return plan, nil
}

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

// powerOfTwoAtLeast is the smallest power of two that is no smaller than a positive number.
func powerOfTwoAtLeast(value int64) int64 { return 1 << bits.Len64(uint64(value-1)) }

// rowsGrid is a block a (sequence, head, run of rows), at least one sequence's. Kernels stride over what is left where
// the grid reaches its limit.
func rowsGrid(g Geometry, rows int64) [3]uint32 {
	const limit = math.MaxInt32
	rowBlocks := ceilDiv(int64(g.HeadDim), rows)
	blocks := int64(max(g.Sequences, 1)) * int64(g.Heads) // below 2^62
	if rowBlocks > 0 && blocks > limit/rowBlocks {
		return [3]uint32{limit, 1, 1}
	}
	return [3]uint32{uint32(blocks * rowBlocks), 1, 1}
}

// oneLaunch is that of a kernel with one entry.
func oneLaunch(grid [3]uint32, threads, sharedBytes uint32) Launch {
	return Launch{Grid: grid, Block: [3]uint32{threads, 1, 1}, SharedBytes: sharedBytes}
}

// rowsPlan is the rule "rows": one launch of a block a (sequence, head, run of `rows` rows).
func rowsPlan(rule map[string]int64, kernel launchable, g Geometry) (KernelPlan, error) {
	rows := rule["rows"]
	if rows < 1 {
		return KernelPlan{}, fmt.Errorf("%d rows", rows)
	}
	return KernelPlan{Launches: []Launch{oneLaunch(rowsGrid(g, rows), kernel.threads, kernel.sharedBytes)}}, nil
}

// paddedRowsPlan is the rule "padded_rows": rowsPlan with lanes, rows, chunk and shared memory found from d_state at run
// time. The lanes of a row are the power of two that covers d_state at `columns` a lane, at most 32; a block has
// `threads` threads and at most `rows` rows; a chunk is what fits `staging_bytes`, at most `chunk` tokens. A token is B
// and C, padded by 4 floats per 32, the block's rows of x, and dt.
func paddedRowsPlan(rule map[string]int64, _ launchable, g Geometry) (KernelPlan, error) {
	for _, name := range []string{"columns", "threads", "rows", "chunk", "staging_bytes"} {
		if rule[name] < 1 {
			return KernelPlan{}, fmt.Errorf("%s %d", name, rule[name])
		}
	}
	n := int64(max(g.DState, 1))
	lanes := min(32, powerOfTwoAtLeast(ceilDiv(n, rule["columns"])))
	rows := max(1, min(rule["rows"], rule["threads"]/lanes))
	columns := 4 * ceilDiv(n, 4*lanes) * lanes
	tokenBytes := 4 * (2*(columns+4*ceilDiv(columns, 32)) + rows + 1)
	chunk := max(1, min(rule["chunk"], rule["staging_bytes"]/tokenBytes))
	shared := ceilDiv(chunk*tokenBytes, 16) * 16
	return KernelPlan{
		Launches: []Launch{oneLaunch(rowsGrid(g, rows), uint32(rows*lanes), uint32(shared))},
		Lanes:    int32(lanes), Rows: int32(rows), Chunk: int32(chunk),
	}, nil
}

// headRuns is the runs of heads of one group: a block has one of them.
func headRuns(g Geometry, heads int64) int64 {
	return int64(g.Groups) * ceilDiv(int64(g.Heads/max(g.Groups, 1)), heads)
}

// channelsPlan is the rule "channels", for head_dim 1: a block a run of `rows` channels of one group and `sequences`
// sequences.
func channelsPlan(rule map[string]int64, kernel launchable, g Geometry) (KernelPlan, error) {
	if rule["rows"] < 1 || rule["sequences"] < 1 {
		return KernelPlan{}, fmt.Errorf("rows %d, sequences %d", rule["rows"], rule["sequences"])
	}
	runs := max(headRuns(g, rule["rows"]), 1)
	shares := ceilDiv(int64(max(g.Sequences, 1)), rule["sequences"])
	grid := [3]uint32{uint32(runs * min(shares, math.MaxInt32/runs)), 1, 1}
	return KernelPlan{Launches: []Launch{oneLaunch(grid, kernel.threads, kernel.sharedBytes)}}, nil
}

// segmentsPlan is the rule "segments": sequences are cut in `segments` of whole chunks, a block a (sequence, segment, run of
// `heads` heads of one group, or of parts of heads where each has `parts_of_head`). With several segments the entry that
// ends in _gather comes first, on all segments but one, each cut again in `gather_cuts` where they are named, with
// `gather_shared` bytes of shared memory where they are named, and stores what the states become over each; then _walk
// runs all segments, and may start before _gather has ended where `overlaps` is 1. The workspace is `state_bytes` for
// each head of each cut that the tokens can fill.
func segmentsPlan(rule map[string]int64, kernel launchable, g Geometry) (KernelPlan, error) {
	for _, name := range []string{"heads", "chunk", "segments", "state_bytes"} {
		if rule[name] < 1 {
			return KernelPlan{}, fmt.Errorf("%s %d", name, rule[name])
		}
	}
	parts, cuts := max(rule["parts_of_head"], 1), max(rule["gather_cuts"], 1)
	walked := g
	walked.Heads *= int32(parts)
	segments, blocks := rule["segments"], int64(max(g.Sequences, 1))*headRuns(walked, rule["heads"])
	launch := func(suffix string, count int64, shared uint32) (Launch, error) {
		for i, entry := range kernel.entries {
			if strings.HasSuffix(entry, suffix) {
				grid := [3]uint32{uint32(min(blocks*count, math.MaxInt32)), 1, 1}
				return Launch{Entry: i, Grid: grid, Block: [3]uint32{kernel.threads, 1, 1}, SharedBytes: shared}, nil
			}
		}
		return Launch{}, fmt.Errorf("no entry %s", suffix)
	}
	var plan KernelPlan
	if segments > 1 {
		shared := kernel.sharedBytes
		if rule["gather_shared"] > 0 {
			shared = uint32(rule["gather_shared"])
		}
		gather, err := launch("_gather", (segments-1)*cuts, shared)
		if err != nil {
			return KernelPlan{}, err
		}
		plan.Launches = append(plan.Launches, gather)
		kept := min(int64(g.Sequences)*segments*cuts, int64(g.Tokens)/rule["chunk"]+int64(g.Sequences))
		plan.WorkspaceBytes = kept * int64(g.Heads) * rule["state_bytes"]
	}
	walk, err := launch("_walk", segments, kernel.sharedBytes)
	if err != nil {
		return KernelPlan{}, err
	}
	walk.Overlaps = segments > 1 && rule["overlaps"] != 0
	plan.Launches = append(plan.Launches, walk)
	return plan, nil
}

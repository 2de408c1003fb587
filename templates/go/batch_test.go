package ssmscan

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
)

func planned(t *testing.T, bounds Bounds) *Plan {
	t.Helper()
	library, err := openVectors(t, Options{})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := library.Plan(bounds)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

var nano = Bounds{
	Tokens: 64, Sequences: 4, Heads: 64, HeadDim: 64, Groups: 8, DState: 128, IO: F32, State: F32, PadSlot: -1,
}

func words(blob []byte, offset int64, count int) []int32 {
	found := make([]int32, count)
	for i := range found {
		found[i] = int32(binary.LittleEndian.Uint32(blob[offset+4*int64(i):]))
	}
	return found
}

func TestAMixedBatchIsSplitByLength(t *testing.T) {
	plan := planned(t, nano)
	if len(plan.Parts) != 2 || plan.Parts[0].Kernel.Row.Family != "update" || plan.Parts[1].Kernel.Row.Family != "ssd" {
		t.Fatalf("want an update part and an ssd part, have %+v", plan.Parts)
	}
	// 64 tokens fill at most a chunk of 64 and a part of one for each of 4 sequences, and each keeps 64 heads' states.
	if parts := plan.Parts; len(parts[0].Launches) != 1 || len(parts[1].Launches) != 2 || plan.WorkspaceBytes < 5*64*64*128*4 {
		t.Errorf("want a launch, then two with a workspace, have %+v", plan)
	}
	batch := plan.NewBatch(9)
	// 1 token, 20 tokens fresh, 8 tokens: decode, prefill, decode; the fourth entry is not used.
	if err := batch.Set([]int32{0, 1, 21, 29}, []int32{8, 3, 0}, []bool{false, true, false}); err != nil {
		t.Fatal(err)
	}
	blob := batch.Bytes()
	for _, test := range []struct {
		name string
		have []int32
		want []int32
	}{
		{"cu_seqlens", words(blob, 0, 5), []int32{0, 1, 21, 29, 29}},
		{"read_slots", words(blob, plan.readSlots, 4), []int32{8, 3, 0, -1}},
		{"decode", words(blob, plan.Parts[0].order, 4), []int32{0, 2, -1, -1}},
		{"prefill", words(blob, plan.Parts[1].order, 4), []int32{1, -1, -1, -1}},
	} {
		if !slices.Equal(test.have, test.want) {
			t.Errorf("%s: want %v, have %v", test.name, test.want, test.have)
		}
	}
	if have := blob[plan.resume : plan.resume+4]; !slices.Equal(have, []byte{1, 0, 1, 0}) {
		t.Errorf("resume: want 1 0 1 0, have %v", have)
	}
	before := slices.Clone(blob)
	var invalid *InvalidProblemError
	if err := batch.Set([]int32{0, 1, 2}, []int32{4, 4}, []bool{false, false}); !errors.As(err, &invalid) {
		t.Errorf("one slot twice: want an InvalidProblemError, have %v", err)
	}
	if !slices.Equal(batch.Bytes(), before) {
		t.Error("after an error: want the blob as it was, have another")
	}
	allocations := testing.AllocsPerRun(20, func() {
		if err := batch.Set([]int32{0, 1, 21, 29}, []int32{8, 3, 0}, []bool{false, true, false}); err != nil {
			t.Fatal(err)
		}
	})
	if allocations != 0 {
		t.Errorf("Set: want no allocation, have %v", allocations)
	}
}

func TestShortAndLongPromptsHavePartsOfTheirOwn(t *testing.T) {
	bounds := nano
	bounds.Tokens, bounds.Sequences, bounds.IO = 9000, 6, BF16
	plan := planned(t, bounds)
	// The vectors' table has recurrent at 256 tokens and ssd at 4096; 1024 is as far from both, and recurrent is the smaller id.
	var have []string
	for _, part := range plan.Parts {
		have = append(have, fmt.Sprintf("%s %d to %d", part.Kernel.Row.Family, part.From, part.To))
	}
	if want := []string{"update 0 to 8", "recurrent 9 to 2047", "ssd 2048 to 9000"}; !slices.Equal(have, want) {
		t.Fatalf("want %q, have %q", want, have)
	}
	batch := plan.NewBatch(6)
	if err := batch.Set([]int32{0, 2048, 2049, 2058, 2066, 4113}, []int32{0, 1, 2, 3, 4}, make([]bool, 5)); err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]int32{{1, 3, -1, -1, -1, -1}, {2, 4, -1, -1, -1, -1}, {0, -1, -1, -1, -1, -1}} {
		if have := words(batch.Bytes(), plan.Parts[i].order, 6); !slices.Equal(have, want) {
			t.Errorf("part %d: want sequences %v, have %v", i, want, have)
		}
	}
	bounds.Invariant = true
	if parts := planned(t, bounds).Parts; len(parts) != 2 || parts[1].From != 9 || parts[1].To != 9000 {
		t.Errorf("invariant: want all prompts in one part, have %+v", parts)
	}
	bounds.Invariant, bounds.Longest = false, 300
	if parts := planned(t, bounds).Parts; len(parts) != 2 || parts[1].Kernel.Row.Family != "recurrent" || parts[1].To != 300 {
		t.Errorf("at most 300 tokens: want prompts in one recurrent part, have %+v", parts)
	}
}

func TestAPlanOfShortSequencesHasOnePart(t *testing.T) {
	bounds := nano
	bounds.Longest = 2
	if plan := planned(t, bounds); len(plan.Parts) != 1 || plan.Parts[0].Kernel.Row.Family != "update" || plan.Parts[0].order >= 0 {
		t.Errorf("at most 2 tokens: want one update part that visits all, have %+v", plan.Parts)
	}
	batch := planned(t, bounds).NewBatch(4)
	var invalid *InvalidProblemError
	if err := batch.Set([]int32{0, 3}, []int32{1}, []bool{true}); !errors.As(err, &invalid) || invalid.Field != "cu_seqlens" {
		t.Errorf("3 tokens: want an InvalidProblemError of cu_seqlens, have %v", err)
	}
	bounds = nano
	bounds.Sequences = 1
	if plan := planned(t, bounds); len(plan.Parts) != 1 || plan.Parts[0].Kernel.Row.Family != "ssd" {
		t.Errorf("one sequence: want one ssd part, have %+v", plan.Parts)
	}
	bounds.HeadDim = 80
	if plan := planned(t, bounds); len(plan.Parts) != 1 || plan.Parts[0].Kernel.Row.Family != "recurrent" {
		t.Errorf("one sequence, head_dim 80: want one recurrent part, have %+v", plan.Parts)
	}
}

func TestAnInvariantPlanDoesNotDependOnItsBounds(t *testing.T) {
	kernels := func(tokens, sequences, longest int32) [2]string {
		bounds := nano
		bounds.Tokens, bounds.Sequences, bounds.Longest, bounds.Invariant = tokens, sequences, longest, true
		plan := planned(t, bounds)
		return [2]string{plan.Parts[0].Choice.ID, plan.Parts[len(plan.Parts)-1].Choice.ID}
	}
	want := kernels(64, 4, 0)
	for _, bounds := range [][3]int32{{4096, 4, 0}, {4096, 512, 0}, {1 << 20, 8, 0}} {
		if have := kernels(bounds[0], bounds[1], bounds[2]); have != want {
			t.Errorf("bounds %v: want %v, have %v", bounds, want, have)
		}
	}
	if have := kernels(9, 8, 2)[0]; have != want[0] {
		t.Errorf("decode alone: want %s, have %s", want[0], have)
	}
	if have := kernels(4096, 1, 0)[1]; have != want[1] {
		t.Errorf("prefill alone: want %s, have %s", want[1], have)
	}
}

func TestPlanAndLaunchSayWhatIsMalformed(t *testing.T) {
	library, err := openVectors(t, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var invalid *InvalidProblemError
	for field, change := range map[string]func(*Bounds){
		"tokens":    func(b *Bounds) { b.Tokens = -1 },
		"sequences": func(b *Bounds) { b.Sequences = 0 },
		"heads":     func(b *Bounds) { b.Heads = 0 },
		"groups":    func(b *Bounds) { b.Groups = 3 },
		"d_state":   func(b *Bounds) { b.DState = -5 },
	} {
		bounds := nano
		change(&bounds)
		if _, err := library.Plan(bounds); !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%s: want an InvalidProblemError of it, have %v", field, err)
		}
	}
	var none *NoKernelError
	bounds := nano
	bounds.DState = 2000
	if _, err := library.Plan(bounds); !errors.As(err, &none) || none.Device != "NVIDIA H200 (sm_90)" {
		t.Errorf("d_state 2000: want a NoKernelError, have %v", err)
	}
	plan := planned(t, nano)
	good := ScanArgs{
		X: 256, Y: 256, DT: 256, A: 256, B: 256, C: 256, State: 256, YStride: 64 * 64, StateStride: 64 * 64 * 128, Slots: 4,
		Workspace: 256, WorkspaceBytes: plan.WorkspaceBytes,
	}
	if err := plan.refuse(&good, 512); err != nil {
		t.Errorf("a good call: want no error, have %v", err)
	}
	for field, change := range map[string]func(*ScanArgs, *uint64){
		"batch":        func(_ *ScanArgs, batch *uint64) { *batch = 0 },
		"x":            func(a *ScanArgs, _ *uint64) { a.X = 0 },
		"dt":           func(a *ScanArgs, _ *uint64) { a.DT += 2 },
		"y_stride":     func(a *ScanArgs, _ *uint64) { a.YStride-- },
		"x_stride":     func(a *ScanArgs, _ *uint64) { a.XStride = -1 },
		"state_stride": func(a *ScanArgs, _ *uint64) { a.StateStride-- },
		"workspace":    func(a *ScanArgs, _ *uint64) { a.WorkspaceBytes-- },
		"slots":        func(a *ScanArgs, _ *uint64) { a.Slots = math.MinInt64 },
	} {
		args, batch := good, uint64(512)
		change(&args, &batch)
		if err := plan.refuse(&args, batch); !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%s: want an InvalidProblemError of it, have %v", field, err)
		}
	}
}

func TestFaultsOfEarlierWorkAreLabelled(t *testing.T) {
	for code, earlier := range map[int]bool{1: false, 200: false, 209: false, 700: true, 716: true, 719: true, 720: false} {
		if have := (&DriverError{Op: "cuLaunchKernel", Code: code}).Earlier(); have != earlier {
			t.Errorf("code %d: want %v, have %v", code, earlier, have)
		}
	}
}

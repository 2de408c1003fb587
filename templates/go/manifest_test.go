package ssmscan

import (
	"errors"
	"math"
	"testing"
)

func TestGridCountsBlocksOfRows(t *testing.T) {
	row := Row{
		ID: "test", Block: 128, Grid: GridRule{"rows", map[string]int64{"rows": 32}},
		Entries: []string{"ssm_test"}, Targets: map[string]Image{"sm_90": {DynamicShared: 5000}},
	}
	for _, test := range []struct {
		sequences, heads, headDim int32
		want                      uint32
	}{
		{1, 64, 64, 128},
		{16, 64, 65, 16 * 64 * 3},
		{0, 64, 64, 128},
		{1 << 30, 1, 32, 1 << 30},
		{math.MaxInt32, 1, 32, math.MaxInt32},
		{math.MaxInt32, math.MaxInt32, math.MaxInt32, math.MaxInt32},
	} {
		plan, err := row.Plan("sm_90", Geometry{Sequences: test.sequences, Heads: test.heads, HeadDim: test.headDim})
		want := Launch{0, [3]uint32{test.want, 1, 1}, [3]uint32{128, 1, 1}, 5000, false}
		if err != nil || len(plan.Launches) != 1 || plan.Launches[0] != want {
			t.Errorf("plan of %v: want %v, have %v (%v)", test, want, plan, err)
		}
	}
	var image *ImageError
	if _, err := row.Plan("sm_75", Geometry{}); !errors.As(err, &image) || image.Field != "target" {
		t.Errorf("no image: want an ImageError of the target, have %v", err)
	}
	row.Grid.Rule = "columns"
	if _, err := row.Plan("sm_90", Geometry{}); !errors.As(err, &image) || image.Field != "grid rule" {
		t.Errorf("unknown rule: want an ImageError of the grid rule, have %v", err)
	}
}

func TestCheckLayoutNamesTheFieldThatMoved(t *testing.T) {
	row := Row{ID: "test", Args: Layout(), ArgsBytes: ScanArgsBytes}
	if err := row.CheckLayout(); err != nil {
		t.Fatal(err)
	}
	var image *ImageError
	row.Args[30].Offset += 4
	if err := row.CheckLayout(); !errors.As(err, &image) || image.Field != "ScanArgs."+row.Args[30].Name {
		t.Errorf("moved field: want an ImageError that names it, have %v", err)
	}
	row.Args = row.Args[1:]
	if err := row.CheckLayout(); !errors.As(err, &image) {
		t.Errorf("missing field: want an ImageError, have %v", err)
	}
}

package ssmscan

import (
	"errors"
	"math"
	"testing"
)

func TestGridCountsBlocksOfRows(t *testing.T) {
	row := Row{ID: "test", Grid: GridRule{Rule: "rows", Rows: 32}}
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
		have, err := row.Blocks(test.sequences, test.heads, test.headDim)
		if err != nil || have != test.want {
			t.Errorf("grid of %v: want %d, have %d (%v)", test, test.want, have, err)
		}
	}
	var image *ImageError
	row.Grid.Rule = "columns"
	if _, err := row.Blocks(1, 1, 1); !errors.As(err, &image) || image.Field != "grid rule" {
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

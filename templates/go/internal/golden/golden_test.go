package golden

import (
	"math"
	"testing"
)

func TestCompareSeesWhatIsOutOfBounds(t *testing.T) {
	expect := Expect{Norm: 1e-3, RTol: 1e-2, ATol: 1e-2, Values: []float64{1, -2, 0, 100}}
	for _, test := range []struct {
		name, dtype string
		out         []float64
		within      bool
	}{
		{"equal", "f32", []float64{1, -2, 0, 100}, true},
		{"close", "f32", []float64{1.01, -2.02, 0, 100.05}, true},
		{"one element beyond its own bound", "f32", []float64{1.03, -2, 0, 100}, false},
		{"all beyond the norm's bound alone", "f32", []float64{1, -2, 0, 100.5}, false},
		{"a unit in the last place of bf16 is taken off", "bf16", []float64{1, -2, 0, 100.5}, true},
		{"two are not", "bf16", []float64{1, -2, 0, 101}, false},
		{"anything at 0", "f32", []float64{1, -2, 1e-30, 100}, false},
		{"a NaN", "f32", []float64{math.NaN(), -2, 0, 100}, false},
		{"an infinity", "f32", []float64{1, math.Inf(-1), 0, 100}, false},
		{"too short", "f32", []float64{1, -2, 0}, false},
	} {
		if errors := expect.Compare(test.dtype, test.out); errors.Within(&expect) != test.within {
			t.Errorf("%s: want within the bounds %v, have %+v", test.name, test.within, errors)
		}
	}
}

func TestUnitIsTheSpacingOfBFloat16(t *testing.T) {
	for value, want := range map[float64]float64{
		1: 1.0 / 128, -1.5: 1.0 / 128, 1.99: 1.0 / 128, 1.999: 1.0 / 64, 0.75: 1.0 / 256, 0x1p-130: 0x1p-133,
	} {
		if have := unit("bf16", value); have != want {
			t.Errorf("unit at %v: want %v, have %v", value, want, have)
		}
	}
}

func TestReadRefusesAFileThatIsCut(t *testing.T) {
	header := `{"name": "x", "buffers": {"b": {"offset": 0, "bytes": 4}}}`
	file := append([]byte("SSMGOLD1\x00\x00\x00\x00\x00\x00\x00\x00"), header...)
	file[8] = byte(len(header))
	if _, err := Read(append(file, 1, 2, 3, 4)); err != nil {
		t.Errorf("whole: want no error, have %v", err)
	}
	for _, bytes := range []int{0, 7, 15, 20, len(file), len(file) + 3} {
		if _, err := Read(append(file, 1, 2, 3, 4)[:bytes]); err == nil {
			t.Errorf("the first %d bytes: want an error, have none", bytes)
		}
	}
}

package ssmtest

import (
	"fmt"
	"io/fs"
	"math"
	"strings"
	"testing"

	"example.com/ssmscan/internal/golden"
	"example.com/ssmscan/internal/storage"
)

// fromReference is the reference as an implementation: rounded to the storage types, other slots kept.
func fromReference(p *Problem) (*Result, error) {
	truth := Reference(p)
	result := &Result{State: append([]float32(nil), p.State...)}
	for _, value := range truth.Y {
		result.Y = append(result.Y, float32(storage.Round(string(p.IO), value)))
	}
	for slot, values := range truth.States {
		row := result.State[int(slot)*p.slotValues():]
		for i, value := range values {
			row[i] = float32(value)
			if p.StateType != "i8" {
				row[i] = float32(storage.Round(string(p.StateType), value))
			}
		}
	}
	return result, nil
}

func TestTheReferencePassesItsOwnCases(t *testing.T) { Run(t, fromReference) }

func TestTheReferenceAgreesWithGoldenVectors(t *testing.T) {
	names, err := fs.Glob(testdata, "testdata/*.golden")
	if err != nil || len(names) == 0 {
		t.Skip("no golden vectors are staged: invoke package puts them here")
	}
	problems, err := Golden()
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		file, err := testdata.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		vector, err := golden.Read(file)
		if err != nil {
			t.Fatal(err)
		}
		truth := Reference(problems[i])
		compare(t, name+": y", vector.Expect["y"].Values, truth.Y)
		values := len(truth.States)
		for row, slot := range vector.Expect["state"].Rows {
			size := problems[i].slotValues()
			compare(t, fmt.Sprintf("%s: slot %d", name, slot), vector.Expect["state"].Values[row*size:(row+1)*size], truth.States[int32(slot)])
			values--
		}
		if values != 0 {
			t.Errorf("%s: want as many stored slots as the vector has, have %d more", name, values)
		}
	}
}

func compare(t *testing.T, what string, want, have []float64) {
	t.Helper()
	if len(want) != len(have) {
		t.Errorf("%s: want %d values, have %d", what, len(want), len(have))
		return
	}
	for i := range want {
		if math.Abs(want[i]-have[i]) > 1e-12*(1+math.Abs(want[i])) {
			t.Errorf("%s[%d]: want %v, have %v", what, i, want[i], have[i])
			return
		}
	}
}

func TestATokenWorkedOutByHand(t *testing.T) {
	// d = 0.5, A = -2: the decay is 1/e. S = 3/e + 0.5 * 4 * 5 = 3/e + 10, y = S * 6 + 7 * 5.
	p := &Problem{
		Tokens: 1, Sequences: 1, Heads: 1, HeadDim: 1, Groups: 1, DState: 1, Slots: 1, IO: "f32", StateType: "f32", PadSlot: -1,
		X: []float32{5}, DT: []float32{0.5}, A: []float32{-2}, B: []float32{4}, C: []float32{6}, D: []float32{7},
		State: []float32{3}, CuSeqlens: []int32{0, 1}, ReadSlots: []int32{0}, WriteSlots: []int32{0}, Resume: []bool{true},
	}
	truth := Reference(p)
	state := 3/math.E + 10
	compare(t, "y", []float64{6*state + 35}, truth.Y)
	compare(t, "state", []float64{state}, truth.States[0])
}

func TestWrongScansAreSeen(t *testing.T) {
	for name, test := range map[string]struct {
		problem *Problem
		spoil   func(*Problem, *Result)
	}{
		"y of the wrong group": {
			Draw("", 1, Shape{[]int{5}, 4, 3, 16, 2}),
			func(p *Problem, r *Result) { copy(r.Y[:3], r.Y[6:9]) },
		},
		"a small error of one head": {
			Draw("", 2, Shape{[]int{50, 3}, 4, 3, 16, 2}),
			func(p *Problem, r *Result) {
				for t := 50; t < 53; t++ {
					r.Y[t*12+4] *= 1 + 5e-5
				}
			},
		},
		"a NaN": {
			Draw("", 3, Shape{[]int{5}, 1, 3, 16, 1}), func(p *Problem, r *Result) { r.Y[7] = float32(math.NaN()) },
		},
		"a slot that nothing stores to": {
			Draw("", 4, Shape{[]int{5}, 1, 3, 16, 1}),
			func(p *Problem, r *Result) { r.State[(1+int(p.ReadSlots[0]))%p.Slots*p.slotValues()] = 0 },
		},
		"y of padding": {
			Draw("", 5, Shape{[]int{1, 1}, 1, 3, 16, 1}, Pad), func(p *Problem, r *Result) { r.Y[4] = 1e-30 },
		},
		"y past the end": {
			Draw("", 6, Shape{[]int{1, 1}, 1, 3, 16, 1}, Tail(1)), func(p *Problem, r *Result) { r.Y[8] = 1e-30 },
		},
		"two units in the last place of bf16": {
			Draw("", 7, Shape{[]int{3}, 1, 1, 16, 1}, Types("bf16", "f32")),
			func(p *Problem, r *Result) { r.Y[2] *= 1 + 3.0/128 },
		},
		"a state that did not decay": {
			Draw("", 8, Shape{[]int{1}, 1, 1, 16, 1}), func(p *Problem, r *Result) {
				copy(r.State[int(p.ReadSlots[0])*16:][:16], p.State[int(p.ReadSlots[0])*16:])
			},
		},
	} {
		have, err := fromReference(test.problem)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Check(test.problem, Reference(test.problem), have); err != nil {
			t.Errorf("%s: before it is spoilt: want no error, have %v", name, err)
		}
		test.spoil(test.problem, have)
		if found, err := Check(test.problem, Reference(test.problem), have); err == nil {
			t.Errorf("%s: want an error, have none: %+v", name, found)
		}
	}
}

func TestCasesAreNamedOnceAndReachEveryOption(t *testing.T) {
	seen := map[string]bool{}
	var gate, columns, limit, pad, moved, discard, order, checkpoints, tail, fresh bool
	for _, p := range Cases() {
		if seen[p.Name] || strings.TrimSpace(p.Name) == "" {
			t.Errorf("%q: want a name of its own", p.Name)
		}
		seen[p.Name] = true
		gate, columns, limit = gate || p.Z != nil, columns || p.PerColumnA, limit || p.Limit != nil
		order, checkpoints = order || p.SequenceOrder != nil, checkpoints || p.CheckpointSlots != nil
		tail = tail || int(p.CuSeqlens[p.Sequences]) < p.Tokens
		for s := range p.Sequences {
			pad, fresh, discard = pad || p.Padding(s), fresh || !p.Resume[s], discard || p.WriteSlots[s] == -1 && !p.Padding(s)
			moved = moved || p.WriteSlots[s] != p.ReadSlots[s]
		}
	}
	if !(gate && columns && limit && pad && moved && discard && order && checkpoints && tail && fresh) {
		t.Error("want a case of every option")
	}
}

package ssmtest

import (
	"fmt"
	"math"

	"example.com/ssmscan/internal/storage"
)

// Errors are how far a result is from the reference: the largest relative norm of the error of y of any head of any
// sequence, and of the state of any head of any slot that is stored to, after one unit in the last place of a storage
// type of fewer bits than f32 is taken off each element. Bound is what both may be.
type Errors struct {
	Y, State, Bound float64
}

// Share is the larger error over what is allowed: at most 1 is right.
func (e Errors) Share() float64 { return max(e.Y, e.State) / e.Bound }

// Check holds a result against what is right. The error says what is wrong.
func Check(p *Problem, truth *Truth, have *Result) (Errors, error) {
	found := Errors{Bound: p.Bound()}
	inner := p.Heads * p.HeadDim
	if len(have.Y) != len(truth.Y) || len(have.State) != len(p.State) {
		return found, fmt.Errorf("want %d values of y and %d of the state, have %d and %d",
			len(truth.Y), len(p.State), len(have.Y), len(have.State))
	}
	for t, live := range truth.Live {
		for i := t * inner; !live && i < (t+1)*inner; i++ {
			if have.Y[i] != 0 {
				return found, fmt.Errorf("y of token %d: want 0, as it is of no sequence, have %v", t, have.Y[i])
			}
		}
	}
	for s := range p.Sequences {
		if p.Padding(s) {
			continue
		}
		for h := range p.Heads {
			var group group
			for t := int(p.CuSeqlens[s]); t < int(p.CuSeqlens[s+1]); t++ {
				for i := (t*p.Heads + h) * p.HeadDim; i < (t*p.Heads+h+1)*p.HeadDim; i++ {
					group.add(excess(string(p.IO), float64(have.Y[i]), truth.Y[i]), truth.Y[i], truth.YTerms[i])
				}
			}
			found.Y = max(found.Y, group.ratio())
		}
	}
	slot := inner * p.DState
	for number := range p.Slots {
		stored := have.State[number*slot : (number+1)*slot]
		want, ok := truth.States[int32(number)]
		if !ok {
			before := p.State[number*slot : (number+1)*slot]
			for i, value := range stored {
				if math.Float32bits(value) != math.Float32bits(before[i]) && !(value != value && before[i] != before[i]) {
					return found, fmt.Errorf("slot %d: want its bits kept, as nothing stores to it, have element %d changed", number, i)
				}
			}
			continue
		}
		for h := range p.Heads {
			found.State = max(found.State, p.stateRatio(stored, want, truth.StateTerms[int32(number)], h))
		}
	}
	if math.IsNaN(found.Y) || math.IsNaN(found.State) || found.Share() > 1 {
		return found, fmt.Errorf("want relative errors of at most %.2e, have y %.2e and state %.2e", found.Bound, found.Y, found.State)
	}
	return found, nil
}

// stateRatio is the relative error of one head of one slot.
func (p *Problem) stateRatio(stored []float32, want, terms []float64, head int) float64 {
	var group group
	for row := head * p.HeadDim; row < (head+1)*p.HeadDim; row++ {
		step := 0.0 // of an 8-bit row
		if p.StateType == "i8" {
			for _, value := range want[row*p.DState : (row+1)*p.DState] {
				step = max(step, math.Abs(value)/127)
			}
		}
		for i := row * p.DState; i < (row+1)*p.DState; i++ {
			off := 0.0
			if p.StateType == "i8" {
				off = max(math.Abs(float64(stored[i])-want[i])-step, 0)
			} else {
				off = excess(string(p.StateType), float64(stored[i]), want[i])
			}
			group.add(off, want[i], terms[i])
		}
	}
	return group.ratio()
}

// excess is the distance from what is right, less one unit in the last place of a 16-bit type.
func excess(dtype string, have, want float64) float64 {
	if dtype == "f32" {
		return math.Abs(have - want)
	}
	if rounded := storage.Round(dtype, want); math.IsInf(rounded, 0) && have == rounded {
		return 0
	}
	return max(math.Abs(have-want)-storage.Unit(dtype, want), 0)
}

// group sums the squares of errors, values and terms.
type group struct{ errors, values, terms float64 }

func (g *group) add(off, want, terms float64) {
	// An error this small says nothing of a value that is not exactly zero.
	if off > 0x1p-126 || want == 0 || off != off {
		g.errors += off * off
	}
	g.values += want * want
	g.terms += terms * terms
}

func (g *group) ratio() float64 {
	if g.errors == 0 {
		return 0
	}
	return math.Sqrt(g.errors / max(g.values, g.terms))
}

package ssmtest

import (
	"fmt"
	"math"

	"example.com/ssmscan/internal/storage"
)

// Errors are how far a result is from the reference: the relative norm of the error of y of the worst head of any
// sequence, and of the state of the worst head of any slot that is stored to, after one unit in the last place of a storage
// type of fewer bits than f32 is taken off each element. The worst is the one with the largest share of its head's bound.
type Errors struct {
	Y, State           float64
	YBound, StateBound float64
}

// Share is the larger error over what is allowed: at most 1 is right.
func (e Errors) Share() float64 {
	share := 0.0
	for _, one := range [][2]float64{{e.Y, e.YBound}, {e.State, e.StateBound}} {
		if one[0] > 0 || math.IsNaN(one[0]) {
			share = max(share, one[0]/one[1]) // a NaN stays one
		}
	}
	return share
}

func (e Errors) String() string {
	return fmt.Sprintf("y %.2e of %.2e, state %.2e of %.2e", e.Y, e.YBound, e.State, e.StateBound)
}

// worse keeps an error and its bound where that is a larger share than what was kept; a NaN is the largest.
func worse(kept, keptBound *float64, found, bound float64) {
	if *keptBound == 0 || math.IsNaN(found) || found/bound > *kept / *keptBound {
		*kept, *keptBound = found, bound
	}
}

// Check holds a result against what is right. The error says what is wrong.
func Check(p *Problem, truth *Truth, have *Result) (Errors, error) {
	var found Errors
	inner := p.Heads * p.HeadDim
	if len(have.Y) != len(truth.Y) || len(have.State) != len(p.State) {
		return found, fmt.Errorf("want %d values of y and %d of the state, have %d and %d",
			len(truth.Y), len(p.State), len(have.Y), len(have.State))
	}
	bounds := p.Bounds()
	for h := range bounds {
		bounds[h] += have.OperandError
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
			worse(&found.Y, &found.YBound, group.ratio(), bounds[h])
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
			worse(&found.State, &found.StateBound, p.stateRatio(stored, want, truth.StateTerms[int32(number)], h), bounds[h])
		}
	}
	if !(found.Share() <= 1) {
		return found, fmt.Errorf("want relative errors within their bounds, have %v", found)
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

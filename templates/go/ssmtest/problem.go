// Package ssmtest holds a scan against a float64 reference: shapes of the suites of other implementations, faults that
// users met in them, and golden vectors. One line tests any implementation:
//
//	func TestScan(t *testing.T) { ssmtest.Run(t, myScan) }
package ssmtest

import (
	"errors"
	"fmt"
	"math"

	"example.com/ssmscan"
)

// Problem is one selective scan on the host, all arrays dense. Values of 16-bit types are already rounded to them.
//
// For a token t of a sequence, head h, group g = h / (Heads / Groups), row p, column n:
//
//	d = dt[t,h] + DTBias[h];  d = log1p(exp(d)) where d <= 20 (Softplus);  d = clamp(d, Limit)
//	S[p,n] = exp(d * A[h]) * S[p,n] + d * B[t,g,n] * x[t,h,p]
//	y[t,h,p] = (sum_n S[p,n] * C[t,g,n] + D[h] * x[t,h,p]) * z[t,h,p] * sigmoid(z[t,h,p])
type Problem struct {
	Name string

	Tokens, Sequences, Heads, HeadDim, Groups, DState, Slots int

	IO, StateType ssmscan.DType // of X, Z, B, C and y; of State
	DTFloat32     bool          // DT is stored as f32 whatever IO is

	X  []float32 // [tokens, heads, head_dim]
	Z  []float32 // like X, or nil
	DT []float32 // [tokens, heads]
	A  []float32 // [heads], or [heads, d_state] with PerColumnA
	B  []float32 // [tokens, groups, d_state]
	C  []float32 // like B
	D  []float32 // [heads], or nil

	DTBias     []float32 // [heads], or nil
	PerColumnA bool
	Softplus   bool
	Limit      *[2]float32 // of d, or nil

	State           []float32 // [slots, heads, head_dim, d_state]
	CuSeqlens       []int32   // [sequences + 1]
	ReadSlots       []int32   // [sequences]
	WriteSlots      []int32   // [sequences]; -1 discards
	Resume          []bool    // [sequences]; false starts at zero
	CheckpointSlots []int32   // [tokens], or nil
	SequenceOrder   []int32   // [sequences], or nil
	PadSlot         int32     // a sequence that reads it is padding
}

// Result is what a scan gives: y [tokens, heads, head_dim] and the pool after the call, as stored and widened to f32.
type Result struct {
	Y     []float32
	State []float32
}

// Implementation runs a problem without changing it. ErrUnsupported, wrapped or not, skips the case with its reason.
type Implementation func(*Problem) (*Result, error)

// ErrUnsupported says that an implementation does not take a problem.
var ErrUnsupported = errors.New("not supported")

// Padding says whether a sequence is padding.
func (p *Problem) Padding(sequence int) bool { return p.ReadSlots[sequence] == p.PadSlot }

// Geometry is the sizes of the problem.
func (p *Problem) Geometry() ssmscan.Geometry {
	longest := int32(0)
	for s := range p.Sequences {
		if !p.Padding(s) {
			longest = max(longest, p.CuSeqlens[s+1]-p.CuSeqlens[s])
		}
	}
	return ssmscan.Geometry{
		Tokens: int32(p.Tokens), Sequences: int32(p.Sequences), Heads: int32(p.Heads), HeadDim: int32(p.HeadDim),
		Groups: int32(p.Groups), DState: int32(p.DState), Longest: longest,
		PerColumnA: p.PerColumnA, CheckpointStep: p.checkpointStep(),
	}
}

// checkpointStep divides every number of tokens of a sequence behind which, before its end, a state is stored.
func (p *Problem) checkpointStep() int32 {
	var step int32
	for s := range p.Sequences {
		for t := p.CuSeqlens[s]; p.CheckpointSlots != nil && t < p.CuSeqlens[s+1]-1; t++ {
			if p.CheckpointSlots[t] >= 0 {
				for a, b := step, t+1-p.CuSeqlens[s]; ; a, b = b%a, a {
					if a == 0 {
						step = b
						break
					}
				}
			}
		}
	}
	return step
}

// group is the group of a head.
func (p *Problem) group(head int) int { return head / (p.Heads / p.Groups) }

// step is d, the step size of a token and head after bias, softplus and limit.
func (p *Problem) step(t, h int) float64 {
	d := float64(p.DT[t*p.Heads+h])
	if p.DTBias != nil {
		d += float64(p.DTBias[h])
	}
	if p.Softplus && d <= 20 {
		d = math.Log1p(math.Exp(d))
	}
	if p.Limit != nil {
		d = min(max(d, float64(p.Limit[0])), float64(p.Limit[1]))
	}
	return d
}

// Bound is what a relative error in f32 may be: 2e-6 + 2^-22 min(tokens, 1 / mean |dt A|).
func (p *Problem) Bound() float64 {
	longest, count, sum := 0, 0, 0.0
	for s := range p.Sequences {
		if p.Padding(s) {
			continue
		}
		begin, end := int(p.CuSeqlens[s]), int(p.CuSeqlens[s+1])
		longest = max(longest, end-begin)
		for t := begin; t < end; t++ {
			for h := range p.Heads {
				sum += math.Abs(p.step(t, h)) * p.meanA(h)
				count++
			}
		}
	}
	remembered := float64(longest)
	if sum > 0 {
		remembered = min(remembered, float64(count)/sum)
	}
	return 2e-6 + remembered/(1<<22)
}

func (p *Problem) meanA(head int) float64 {
	if !p.PerColumnA {
		return math.Abs(float64(p.A[head]))
	}
	sum := 0.0
	for _, a := range p.A[head*p.DState : (head+1)*p.DState] {
		sum += math.Abs(float64(a))
	}
	return sum / float64(p.DState)
}

func (p *Problem) String() string {
	return fmt.Sprintf("%s: %d tokens in %d sequences, %d heads x %d x %d, %d groups, io %s, state %s",
		p.Name, p.Tokens, p.Sequences, p.Heads, p.HeadDim, p.DState, p.Groups, p.IO, p.StateType)
}

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
	// OperandError is the relative norm of the error that rounding of the operands of matrix products may cause, beyond
	// that of f32 arithmetic: 0 but for implementations on tensor cores.
	OperandError float64
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

// Bounds are what the relative error of each head may be in f32: 2e-6 + 2^-22 min(tokens, 1 / (mean d min |A|)). A state
// remembers the roundings of its last 1 / (d |A|) decays: d is the mean over the head's tokens of sequences that are not
// padding, A that of the column that decays most slowly, tokens those of the longest sequence.
func (p *Problem) Bounds() []float64 {
	longest, count := 0, 0
	sums := make([]float64, p.Heads)
	for s := range p.Sequences {
		if p.Padding(s) {
			continue
		}
		begin, end := int(p.CuSeqlens[s]), int(p.CuSeqlens[s+1])
		longest, count = max(longest, end-begin), count+end-begin
		for t := begin; t < end; t++ {
			for h := range p.Heads {
				sums[h] += math.Abs(p.step(t, h))
			}
		}
	}
	for h, sum := range sums {
		remembered := 0.0
		if longest > 0 {
			// Where nothing decays, or a step size is no number, every token counts.
			remembered = float64(longest)
			if decay := sum / float64(count) * p.leastA(h); decay > 1/remembered {
				remembered = 1 / decay
			}
		}
		sums[h] = 2e-6 + remembered/(1<<22)
	}
	return sums
}

// leastA is |A| of the column of a head that decays most slowly.
func (p *Problem) leastA(head int) float64 {
	if !p.PerColumnA {
		return math.Abs(float64(p.A[head]))
	}
	least := math.Inf(1)
	for _, a := range p.A[head*p.DState : (head+1)*p.DState] {
		least = min(least, math.Abs(float64(a)))
	}
	return least
}

func (p *Problem) String() string {
	return fmt.Sprintf("%s: %d tokens in %d sequences, %d heads x %d x %d, %d groups, io %s, state %s",
		p.Name, p.Tokens, p.Sequences, p.Heads, p.HeadDim, p.DState, p.Groups, p.IO, p.StateType)
}

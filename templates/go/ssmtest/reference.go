package ssmtest

import "math"

// Truth is what a scan has to give: the recurrence in float64, and beside each value the root of the sum of squares of
// the terms that it is the sum of, which is what independent roundings of the terms add up to.
type Truth struct {
	Y, YTerms   []float64           // [tokens, heads, head_dim]
	States      map[int32][]float64 // by slot that is stored to: [heads, head_dim, d_state]
	StateTerms  map[int32][]float64
	Live        []bool // tokens of a sequence that is not padding; y is 0 at the others
	stateValues int
}

// Reference runs the recurrence in float64.
func Reference(p *Problem) *Truth {
	inner := p.Heads * p.HeadDim
	truth := &Truth{
		Y: make([]float64, p.Tokens*inner), YTerms: make([]float64, p.Tokens*inner),
		States: map[int32][]float64{}, StateTerms: map[int32][]float64{},
		Live: make([]bool, p.Tokens), stateValues: inner * p.DState,
	}
	for s := range p.Sequences {
		if !p.Padding(s) {
			p.sequence(truth, s)
		}
	}
	return truth
}

// stored gives the arrays of a slot that is stored to.
func (r *Truth) stored(slot int32) (state, terms []float64) {
	if r.States[slot] == nil {
		r.States[slot], r.StateTerms[slot] = make([]float64, r.stateValues), make([]float64, r.stateValues)
	}
	return r.States[slot], r.StateTerms[slot]
}

func (p *Problem) sequence(truth *Truth, s int) {
	begin, end, n := int(p.CuSeqlens[s]), int(p.CuSeqlens[s+1]), p.DState
	S, Q := make([]float64, n), make([]float64, n) // one row of the state, and the squares of its terms
	for h := range p.Heads {
		for row := range p.HeadDim {
			clear(S)
			if p.Resume[s] {
				slot := ((int(p.ReadSlots[s])*p.Heads+h)*p.HeadDim + row) * n
				for i, value := range p.State[slot : slot+n] {
					S[i] = float64(value)
				}
			}
			for i := range S {
				Q[i] = S[i] * S[i]
			}
			at := (h*p.HeadDim + row) * n
			store := func(slot int32) {
				state, terms := truth.stored(slot)
				copy(state[at:], S)
				for i, square := range Q {
					terms[at+i] = math.Sqrt(square)
				}
			}
			for t := begin; t < end; t++ {
				truth.Live[t] = true
				p.token(truth, t, h, row, S, Q)
				if p.CheckpointSlots != nil && p.CheckpointSlots[t] >= 0 {
					store(p.CheckpointSlots[t])
				}
			}
			if p.WriteSlots[s] >= 0 {
				store(p.WriteSlots[s])
			}
		}
	}
}

// token moves one row of one head on by a token.
func (p *Problem) token(truth *Truth, t, h, row int, S, Q []float64) {
	n, g := p.DState, p.group(h)
	out := (t*p.Heads+h)*p.HeadDim + row
	d, x := p.step(t, h), float64(p.X[out])
	B, C := p.B[(t*p.Groups+g)*n:][:n], p.C[(t*p.Groups+g)*n:][:n]
	decay := math.Exp(d * float64(p.A[h*len(p.A)/p.Heads]))
	var y, squares, terms float64
	for i := range S {
		if p.PerColumnA {
			decay = math.Exp(d * float64(p.A[h*n+i]))
		}
		term := d * float64(B[i]) * x
		S[i] = decay*S[i] + term
		Q[i] = decay*decay*Q[i] + term*term
		c := float64(C[i])
		y += S[i] * c
		squares += S[i] * S[i] * c * c
		terms += Q[i] * c * c
	}
	squares = max(squares, terms)
	if p.D != nil {
		skip := float64(p.D[h]) * x
		y += skip
		squares += skip * skip
	}
	gate := 1.0
	if p.Z != nil {
		z := float64(p.Z[out])
		gate = z / (1 + math.Exp(-z))
	}
	truth.Y[out], truth.YTerms[out] = y*gate, math.Sqrt(squares)*math.Abs(gate)
}

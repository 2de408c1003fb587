package ssmtest

import (
	"math"
	"math/rand/v2"

	"example.com/ssmscan"
	"example.com/ssmscan/internal/storage"
)

// Shape is what a draw needs to know: the tokens of each sequence, and the geometry.
type Shape struct {
	Lengths                        []int
	Heads, HeadDim, DState, Groups int
}

// Option changes a problem that was drawn.
type Option func(*Problem, *rand.Rand)

// Draw makes a problem of N(0, 1) inputs with A in -2 to -1, dt_bias in -4 to -3, softplus and D. Every sequence resumes
// from a slot of its own, in random order, in a pool with two slots more; what nothing may read holds NaN. The same seed
// gives the same problem.
func Draw(name string, seed uint64, shape Shape, options ...Option) *Problem {
	random := rand.New(rand.NewPCG(seed, 1))
	p := &Problem{
		Name: name, Sequences: len(shape.Lengths), Heads: shape.Heads, HeadDim: shape.HeadDim, Groups: shape.Groups,
		DState: shape.DState, Slots: len(shape.Lengths) + 2, IO: ssmscan.F32, StateType: ssmscan.F32, Softplus: true, PadSlot: -1,
	}
	p.CuSeqlens = []int32{0}
	for _, length := range shape.Lengths {
		p.Tokens += length
		p.CuSeqlens = append(p.CuSeqlens, int32(p.Tokens))
	}
	p.X = normal(random, p.Tokens*p.Heads*p.HeadDim)
	p.DT = normal(random, p.Tokens*p.Heads)
	p.B, p.C = normal(random, p.Tokens*p.Groups*p.DState), normal(random, p.Tokens*p.Groups*p.DState)
	p.A, p.DTBias = uniform(random, p.Heads, -2, -1), uniform(random, p.Heads, -4, -3)
	p.D = normal(random, p.Heads)
	p.State = normal(random, p.Slots*p.slotValues())
	for _, slot := range random.Perm(p.Slots)[:p.Sequences] {
		p.ReadSlots = append(p.ReadSlots, int32(slot))
		p.Resume = append(p.Resume, true)
	}
	p.WriteSlots = append([]int32(nil), p.ReadSlots...)
	for _, option := range options {
		option(p, random)
	}
	p.poison()
	p.round(random)
	return p
}

func (p *Problem) slotValues() int { return p.Heads * p.HeadDim * p.DState }

func normal(random *rand.Rand, count int) []float32 {
	values := make([]float32, count)
	for i := range values {
		values[i] = float32(random.NormFloat64())
	}
	return values
}

func uniform(random *rand.Rand, count int, low, high float64) []float32 {
	values := make([]float32, count)
	for i := range values {
		values[i] = float32(low + (high-low)*random.Float64())
	}
	return values
}

// poison fills the slots that nothing reads with NaN.
func (p *Problem) poison() {
	read := map[int32]bool{}
	for s, slot := range p.ReadSlots {
		read[slot] = read[slot] || p.Resume[s] && !p.Padding(s)
	}
	for slot := range p.Slots {
		if !read[int32(slot)] {
			for i := range p.slotValues() {
				p.State[slot*p.slotValues()+i] = float32(math.NaN())
			}
		}
	}
}

// round makes every array one that its storage type holds exactly.
func (p *Problem) round(random *rand.Rand) {
	for _, array := range [][]float32{p.X, p.Z, p.B, p.C} {
		roundAll(string(p.IO), array)
	}
	if !p.DTFloat32 {
		roundAll(string(p.IO), p.DT)
	}
	if p.StateType != ssmscan.I8 {
		roundAll(string(p.StateType), p.State)
		return
	}
	for row := 0; row < len(p.State); row += p.DState { // whole steps of a power of two, the largest being 127
		if p.State[row] != p.State[row] {
			for i := row; i < row+p.DState; i++ {
				p.State[i] = 0 // 8 bits have no NaN
			}
			continue
		}
		for i := row; i < row+p.DState; i++ {
			p.State[i] = float32(random.IntN(255)-127) / 64
		}
		p.State[row] = 127.0 / 64
	}
}

func roundAll(dtype string, values []float32) {
	for i, value := range values {
		values[i] = float32(storage.Round(dtype, float64(value)))
	}
}

// The options.

// Fresh makes sequences start at zero: all of them, or every second one.
func Fresh(all bool) Option {
	return func(p *Problem, _ *rand.Rand) {
		for s := range p.Resume {
			if all || s%2 == 1 {
				p.Resume[s] = false
			}
		}
	}
}

// Gate adds z.
func Gate(p *Problem, random *rand.Rand) { p.Z = normal(random, len(p.X)) }

// Plain takes D, dt_bias and softplus away; dt is then a step size as it stands.
func Plain(p *Problem, random *rand.Rand) {
	p.D, p.DTBias, p.Softplus = nil, nil, false
	p.DT = uniform(random, len(p.DT), 0.001, 0.1)
}

// Columns gives A a value for each column.
func Columns(p *Problem, random *rand.Rand) {
	p.PerColumnA, p.A = true, uniform(random, p.Heads*p.DState, -2, -1)
}

// Types sets the storage types, dt being f32.
func Types(io, state ssmscan.DType) Option {
	return func(p *Problem, _ *rand.Rand) { p.IO, p.StateType, p.DTFloat32 = io, state, true }
}

// Both is one option after another.
func Both(first, second Option) Option {
	return func(p *Problem, random *rand.Rand) {
		first(p, random)
		second(p, random)
	}
}

// Clamp sets the limit of dt.
func Clamp(low, high float32) Option {
	return func(p *Problem, _ *rand.Rand) { p.Limit = &[2]float32{low, high} }
}

// Moved writes to other slots than are read.
func Moved(p *Problem, random *rand.Rand) {
	state := normal(random, 2*p.Slots*p.slotValues())
	copy(state, p.State)
	p.State = state
	for s := range p.WriteSlots {
		p.WriteSlots[s] += int32(p.Slots)
	}
	p.Slots *= 2
}

// Discard throws away the final state of every second sequence.
func Discard(p *Problem, _ *rand.Rand) {
	for s := 0; s < p.Sequences; s += 2 {
		p.WriteSlots[s] = -1
	}
}

// Pad makes every third sequence padding; slot 0, which a clamped index would hit, is never one's own.
func Pad(p *Problem, _ *rand.Rand) {
	for s := 1; s < p.Sequences; s += 3 {
		p.ReadSlots[s], p.WriteSlots[s] = p.PadSlot, p.PadSlot
	}
}

// Tail adds tokens that belong to no sequence.
func Tail(tokens int) Option {
	return func(p *Problem, random *rand.Rand) {
		p.Tokens += tokens
		p.X = append(p.X, normal(random, tokens*p.Heads*p.HeadDim)...)
		p.DT = append(p.DT, normal(random, tokens*p.Heads)...)
		p.B = append(p.B, normal(random, tokens*p.Groups*p.DState)...)
		p.C = append(p.C, normal(random, tokens*p.Groups*p.DState)...)
	}
}

// Checkpoints stores the state after every so many tokens in slots of their own.
func Checkpoints(every int) Option {
	return func(p *Problem, random *rand.Rand) {
		p.CheckpointSlots = make([]int32, p.Tokens)
		for t := range p.CheckpointSlots {
			p.CheckpointSlots[t] = -1
		}
		for s := range p.Sequences {
			for t := int(p.CuSeqlens[s]) + every - 1; t < int(p.CuSeqlens[s+1]) && !p.Padding(s); t += every {
				p.CheckpointSlots[t] = int32(p.Slots)
				p.Slots++
				p.State = append(p.State, normal(random, p.slotValues())...)
			}
		}
	}
}

// Shared makes sequences resume from the slot of the first and write to slots of their own.
func Shared(p *Problem, random *rand.Rand) {
	Moved(p, random)
	for s := range p.ReadSlots {
		p.ReadSlots[s] = p.ReadSlots[0]
	}
}

// Order visits the sequences in another order.
func Order(p *Problem, random *rand.Rand) {
	p.SequenceOrder = nil
	for _, s := range random.Perm(p.Sequences) {
		p.SequenceOrder = append(p.SequenceOrder, int32(s))
	}
}

// Steps sets every dt.
func Steps(dt float32) Option {
	return func(p *Problem, _ *rand.Rand) {
		for i := range p.DT {
			p.DT[i] = dt
		}
	}
}

// Decays draws A from a range.
func Decays(low, high float64) Option {
	return func(p *Problem, random *rand.Rand) { p.A = uniform(random, len(p.A), low, high) }
}

// Uniform draws all inputs from -1 to 1, A among them, as ggml's own test does.
func Uniform(p *Problem, random *rand.Rand) {
	for _, array := range [][]float32{p.X, p.DT, p.B, p.C, p.A, p.State} {
		copy(array, uniform(random, len(array), -1, 1))
	}
}

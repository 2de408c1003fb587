package ssmtest

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"example.com/ssmscan"
	"example.com/ssmscan/internal/golden"
)

//go:embed testdata
var testdata embed.FS

// Cases gives all cases: Suites, Faults, and the golden vectors of a package. Shapes are those of the suites, cut in heads,
// channels and batch only.
func Cases() []*Problem {
	problems := append(Suites(), Faults()...)
	vectors, err := Golden()
	if err != nil {
		panic(fmt.Sprintf("ssmtest: the embedded golden vectors: %v", err)) // they are part of the package
	}
	return append(problems, vectors...)
}

func repeat(length, count int) []int {
	lengths := make([]int, count)
	for i := range lengths {
		lengths[i] = length
	}
	return lengths
}

// Suites gives the shapes that other implementations test themselves on.
func Suites() []*Problem {
	var problems []*Problem
	add := func(name string, lengths []int, heads, headDim, dState, groups int, options ...Option) {
		seed := uint64(len(problems) + 1)
		problems = append(problems, Draw(name, seed, Shape{lengths, heads, headDim, dState, groups}, options...))
	}
	bf16, f16 := Types(ssmscan.BF16, ssmscan.F32), Types(ssmscan.F16, ssmscan.F32)

	add("ggml Mamba-1", repeat(32, 4), 16, 1, 16, 1, Columns, Uniform)
	add("ggml n128", repeat(32, 4), 4, 64, 128, 2, Uniform)
	add("ggml n256", repeat(32, 4), 2, 64, 256, 2, Uniform)
	add("ggml p128", repeat(16, 2), 4, 128, 128, 4, Uniform)
	add("ggml long", repeat(512, 2), 2, 64, 128, 2)

	for _, n := range []int{16, 32, 64} {
		add(fmt.Sprintf("selective_state_update n%d", n), repeat(1, 2), 48, 1, n, 1, Columns, Gate)
	}
	for _, groups := range []int{1, 2, 4} {
		add(fmt.Sprintf("selective_state_update with %d groups bf16", groups), repeat(1, 2), 4, 64, 64, groups, bf16)
	}
	add("selective_state_update slots bf16", repeat(1, 16), 4, 64, 128, 1, bf16, Moved)
	add("state_update padded rows", repeat(1, 8), 2, 32, 64, 1, Pad)
	add("state_update lengths 1 to 4 bf16", []int{3, 1, 4, 2, 4}, 2, 64, 64, 1, bf16, Checkpoints(1))
	for _, tokens := range []int{1, 2, 4, 8} {
		add(fmt.Sprintf("decode of %d tokens n96", tokens), repeat(tokens, 3), 8, 64, 96, 4, Checkpoints(1))
	}
	add("decode n256 f16", repeat(1, 64), 4, 64, 256, 1, f16)
	add("decode 8-bit state", repeat(2, 3), 2, 64, 128, 1, Types(ssmscan.F32, ssmscan.I8))
	add("decode bf16 state", repeat(2, 3), 2, 64, 128, 1, Types(ssmscan.BF16, ssmscan.BF16))

	for _, length := range []int{8, 64, 372, 1134} {
		add(fmt.Sprintf("selective_scan of %d", length), repeat(length, 2), 4, 1, 8, 1, Columns, Gate, Fresh(true))
	}
	add("ssd lengths 128 256 128", []int{128, 256, 128}, 4, 64, 128, 2, Fresh(true))
	add("ssd lengths 80 176 bf16", []int{80, 176}, 4, 64, 128, 2, bf16)
	for _, shape := range [][2]int{{3, 5}, {4, 8}, {11, 19}, {2, 128}} {
		add(fmt.Sprintf("ssd %d heads x %d", shape[0], shape[1]), []int{119}, shape[0], shape[1], 64, 1)
	}
	add("ssd continued in chunks", []int{64, 32, 16, 8, 8, 8, 16, 32, 16, 8}, 3, 16, 32, 1, Fresh(false))
	add("ssd of 5, 1, 1, 1", []int{5, 1, 1, 1, 30, 2, 2}, 2, 32, 64, 1)
	varlen := make([]int, 60)
	for i := range varlen {
		varlen[i] = 1 + i*37%199
	}
	add("chunk_state_varlen", varlen, 2, 16, 32, 2, Fresh(true))
	return problems
}

// Faults gives a case of each kind of fault that users met in other implementations.
func Faults() []*Problem {
	var problems []*Problem
	add := func(name string, lengths []int, heads, headDim, dState, groups int, options ...Option) {
		seed := uint64(1000 + len(problems))
		problems = append(problems, Draw(name, seed, Shape{lengths, heads, headDim, dState, groups}, options...))
	}
	boundaries := make([]int, 70)
	for i := range boundaries {
		boundaries[i] = i
	}
	add("a boundary at every offset of a chunk", boundaries, 1, 9, 128, 1, Fresh(false))
	add("groups by division and not by modulo", []int{7, 3}, 6, 8, 128, 3)
	add("padding leaves slot 0 alone", repeat(2, 7), 2, 9, 128, 1, Pad)
	add("a fresh sequence over NaN", []int{40, 1, 0}, 2, 9, 128, 1, Fresh(true))
	add("initial states are used", []int{150}, 2, 9, 128, 1)
	add("strong decay stays finite", []int{70}, 2, 9, 128, 1, Plain, Steps(20), Decays(-1e4, -9e3))
	add("small steps are not lost", []int{20}, 2, 9, 128, 1, Steps(-13), Decays(-1e-3, -1e-4))
	add("softplus below the threshold", []int{20}, 2, 9, 128, 1, Steps(23.9))
	add("positive A", []int{20}, 2, 9, 128, 1, Plain, Decays(0.1, 0.5))
	add("states of 100 columns", []int{33, 2}, 2, 96, 100, 1, Gate)
	add("heads of 80 rows", []int{33, 2}, 3, 80, 128, 1)
	add("heads of 5 rows", []int{33, 2}, 3, 5, 128, 1)
	add("1024 columns", []int{9, 1}, 1, 9, 1024, 1)
	add("no tokens but a state to copy", []int{0, 0}, 2, 9, 128, 1, Moved)
	add("every option at once", []int{67, 1, 0, 130, 9}, 6, 33, 128, 3,
		Gate, Fresh(false), Moved, Pad, Discard, Checkpoints(7), Tail(2), Order, Clamp(0.01, 0.1))
	add("sequences that share a prefix", []int{9, 30, 1}, 2, 9, 128, 1, Shared)
	return problems
}

// ShapeOf is a problem of a kernel's own d_state, head_dim and types: sequences of these lengths. Where head_dim is 1 only, A
// has a value for each column, as in Mamba-1.
func ShapeOf(row *ssmscan.Row, lengths ...int) (Shape, Option) {
	sizes := Shape{Lengths: lengths, Heads: 4, HeadDim: 33, DState: int(row.Spec.DState), Groups: 2}
	if sizes.DState == 0 {
		sizes.DState = 77
	}
	if limits, ok := row.Limits["head_dim"]; ok {
		sizes.HeadDim = int(limits[0])
	}
	types := Types(row.Spec.IO, row.Spec.State)
	if sizes.HeadDim == 1 {
		sizes.Heads = 36
		return sizes, Both(types, Columns)
	}
	return sizes, types
}

// CasesOf gives cases of a kernel's own sizes, of which there are some that it takes whatever it is specialised on.
func CasesOf(row *ssmscan.Row) []*Problem {
	every := 7 // tokens between the states that are stored
	if limits, ok := row.Limits["checkpoint_step_multiple"]; ok {
		every = int(limits[0])
	}
	short, types := ShapeOf(row, 1, 2, 0, 8, 1)
	long, _ := ShapeOf(row, 67, 1, 0, 130, 9)
	prompt, _ := ShapeOf(row, 700)
	prompt.Heads, prompt.Groups = prompt.Heads/2, 1
	drafts, _ := ShapeOf(row, 4, 8, 1, 3, 4)
	step, _ := ShapeOf(row, slices.Repeat([]int{1}, 33)...)
	return []*Problem{
		Draw("own decode", 91, short, types, Fresh(false), Gate, Moved, Pad),
		Draw("own lengths", 92, long, types, Fresh(false), Gate, Checkpoints(every), Tail(2)),
		Draw("own prompt", 93, prompt, types),
		Draw("own drafts", 95, drafts, types, Checkpoints(1), Discard, Clamp(0.01, 0.1)),
		Draw("own step", 96, step, types, Moved, Gate, Order, Tail(3)),
	}
}

// Golden gives the golden vectors that a package holds: problems with results of a reference that is not this one. Their
// views of one buffer are taken apart.
func Golden() ([]*Problem, error) {
	names, err := fs.Glob(testdata, "testdata/*.golden")
	if err != nil {
		return nil, err
	}
	var problems []*Problem
	for _, name := range names {
		file, err := testdata.ReadFile(name)
		if err != nil {
			return nil, err
		}
		vector, err := golden.Read(file)
		if err != nil {
			return nil, err
		}
		problem, err := fromVector(vector)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path.Base(name), err)
		}
		problem.Name = "golden " + strings.TrimSuffix(path.Base(name), ".golden")
		problems = append(problems, problem)
	}
	return problems, nil
}

package ssmscan

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strconv"
)

// Bounds are what a plan is made for: a batch may be smaller, and its contents may change while the plan, and a CUDA
// graph captured with it, stay.
type Bounds struct {
	Tokens    int32 // rows of x and y, whatever part of them a batch uses
	Sequences int32
	Longest   int32 // tokens of the longest sequence; 0 is not known
	Heads     int32
	HeadDim   int32
	Groups    int32
	DState    int32
	IO, State DType
	// PerColumnA says that A has a value for each column, and CheckpointStep what divides every number of tokens behind
	// which a state is stored before a sequence's end; 0: none is.
	PerColumnA     bool
	CheckpointStep int32
	// Invariant chooses by the geometry and each sequence's own length alone: whatever else is in a batch, and whatever
	// the bounds are, a sequence has the same bits.
	Invariant bool
	// PadSlot is the read slot that marks padding, and that of the entries that a smaller batch does not use.
	PadSlot int32
}

func (b *Bounds) problem(sequences, tokens, longest int32) Problem {
	return Problem{
		Geometry: Geometry{
			Tokens: tokens, Sequences: sequences, Longest: longest,
			Heads: b.Heads, HeadDim: b.HeadDim, Groups: b.Groups, DState: b.DState,
			PerColumnA: b.PerColumnA, CheckpointStep: b.CheckpointStep,
		},
		IO: b.IO, State: b.State,
	}
}

func (b *Bounds) check() error {
	for _, size := range []struct {
		field       string
		least, have int32
	}{
		{"tokens", 0, b.Tokens}, {"sequences", 1, b.Sequences}, {"longest", 0, b.Longest}, {"heads", 1, b.Heads},
		{"head_dim", 1, b.HeadDim}, {"groups", 1, b.Groups}, {"d_state", 1, b.DState},
	} {
		if size.have < size.least {
			return &InvalidProblemError{size.field, fmt.Sprintf("at least %d", size.least), strconv.Itoa(int(size.have))}
		}
	}
	if b.Heads%b.Groups != 0 {
		return &InvalidProblemError{"groups", fmt.Sprintf("a divisor of %d heads", b.Heads), strconv.Itoa(int(b.Groups))}
	}
	return nil
}

// Part is the launches of one kernel: for every sequence of a batch, or for those whose tokens are From to To.
type Part struct {
	Kernel   *Embedded
	Choice   Choice
	From, To int32
	KernelPlan
	order int64 // offset of its sequence_order in the blob, -1 where it visits every sequence
}

// mostParts is how many a plan has: decode, short prompts, long prompts.
const mostParts = 3

// Plan is how batches within some bounds are run. It is never changed, and serves any number of layers.
type Plan struct {
	Bounds
	Parts []Part
	// WorkspaceBytes is what the caller has to give each launch that may run at the same time as another.
	WorkspaceBytes int64
	// BatchBytes is the size of a batch's blob.
	BatchBytes int64

	readSlots, resume int64 // offsets in the blob; cu_seqlens is at 0
}

// Plan finds how batches are run: a sequence of at most DecodeTokens tokens by the kernel that is best for decode, a longer
// one by the kernel that is best for a prompt of its length. Where that is one kernel for all lengths, or the bounds allow no
// long sequence, the plan has one part; else each kernel visits its own sequences over the same arrays, and nothing is
// repacked.
func (l *Library) Plan(b Bounds) (*Plan, error) {
	if err := b.check(); err != nil {
		return nil, err
	}
	plan := &Plan{Bounds: b}
	words := 4 * int64(b.Sequences)
	plan.readSlots = words + 4
	plan.resume = plan.readSlots + words
	end := plan.resume + int64(b.Sequences)
	plan.BatchBytes = end
	longest := b.Longest
	if longest == 0 || longest > b.Tokens {
		longest = b.Tokens
	}
	var err error
	if longest > DecodeTokens && b.Sequences > 1 {
		plan.Parts, err = l.split(&b, longest)
	} else {
		var choice Choice
		choice, err = l.Select(b.problem(b.Sequences, b.Tokens, longest), b.Invariant)
		plan.Parts = []Part{{Choice: choice, To: longest}}
	}
	if err != nil {
		return nil, err
	}
	for i := range plan.Parts {
		part := &plan.Parts[i]
		part.Kernel, part.order = l.kernels[part.Choice.ID], -1
		if len(plan.Parts) > 1 {
			// The lists are padded to whole words of 4 bytes after the bytes of resume.
			part.order = ceilDiv(end, 4)*4 + int64(i)*words
			plan.BatchBytes = part.order + words
		}
		geometry := b.problem(b.Sequences, b.Tokens, part.To).Geometry
		if part.KernelPlan, err = part.Kernel.Row.Plan(part.Kernel.Target, geometry); err != nil {
			return nil, err
		}
		plan.WorkspaceBytes = max(plan.WorkspaceBytes, part.WorkspaceBytes)
	}
	return plan, nil
}

// split chooses for decode, of which any of the sequences may be, and for a prompt of each length, which may have all the
// tokens. Long prompts take the choice of the longest, down to the power of two where another begins; short ones take that
// other.
func (l *Library) split(b *Bounds, longest int32) ([]Part, error) {
	var parts []Part
	add := func(to int32, choice Choice) {
		if last := len(parts) - 1; last >= 0 && parts[last].Choice.ID == choice.ID {
			parts[last].To = to
			return
		}
		from := int32(0)
		if len(parts) > 0 {
			from = parts[len(parts)-1].To + 1
		}
		parts = append(parts, Part{Choice: choice, From: from, To: to})
	}
	decode, err := l.Select(b.problem(b.Sequences, min(b.Tokens, b.Sequences), DecodeTokens), b.Invariant)
	if err != nil {
		return nil, err
	}
	add(DecodeTokens, decode)
	long, err := l.Select(b.problem(1, longest, longest), b.Invariant)
	if err != nil {
		return nil, err
	}
	// Lengths with as many binary digits are alike for selection: those of the longest are long.
	for from := int32(1) << (bits.Len32(uint32(longest)) - 2); from > DecodeTokens/2; from /= 2 {
		length := max(from, DecodeTokens+1)
		choice, err := l.Select(b.problem(1, length, length), b.Invariant)
		if err != nil {
			return nil, err
		}
		if choice.ID != long.ID {
			add(min(2*from-1, longest), choice)
			break
		}
	}
	add(longest, long)
	return parts, nil
}

// Batch is the blob of one step: offsets, slots, freshness and the order lists of a plan's parts, which one asynchronous
// upload brings to the device for all layers. It is used by one goroutine at a time.
type Batch struct {
	plan  *Plan
	slots int64
	blob  []byte
	seen  []uint64 // by slot, the number of the last Set that wrote it
	turn  uint64
}

// NewBatch makes the batch of a plan over a pool of so many slots.
func (p *Plan) NewBatch(slots int64) *Batch {
	return &Batch{plan: p, slots: slots, blob: make([]byte, p.BatchBytes), seen: make([]uint64, slots)}
}

// Bytes is the blob, valid until the next Set. It is the same memory each time.
func (b *Batch) Bytes() []byte { return b.blob }

// Set checks a batch and packs it: cu_seqlens are token offsets [sequences + 1], slots [sequences] are read and written in
// place, and a fresh sequence starts at zero whatever its slot holds. A slot of PadSlot marks padding. After an error the
// blob is as it was. It allocates nothing.
func (b *Batch) Set(cuSeqlens, slots []int32, fresh []bool) error {
	p := b.plan
	if err := b.check(cuSeqlens, slots, fresh); err != nil {
		return err
	}
	count, word := len(slots), binary.LittleEndian
	clear(b.blob)
	for i := range int(p.Sequences) + 1 {
		word.PutUint32(b.blob[4*i:], uint32(cuSeqlens[min(i, count)]))
	}
	for i := range int(p.Sequences) {
		slot := p.PadSlot
		if i < count {
			slot = slots[i]
			if !fresh[i] {
				b.blob[p.resume+int64(i)] = 1
			}
		}
		word.PutUint32(b.blob[p.readSlots+4*int64(i):], uint32(slot))
	}
	if len(p.Parts) < 2 {
		return nil
	}
	var visited [mostParts]int64
	for i := range count {
		part := 0
		for part < len(p.Parts)-1 && cuSeqlens[i+1]-cuSeqlens[i] > p.Parts[part].To {
			part++
		}
		word.PutUint32(b.blob[p.Parts[part].order+4*visited[part]:], uint32(i))
		visited[part]++
	}
	for part := range p.Parts { // an entry out of range is visited by no one
		for i := visited[part]; i < int64(p.Sequences); i++ {
			word.PutUint32(b.blob[p.Parts[part].order+4*i:], ^uint32(0))
		}
	}
	return nil
}

func (b *Batch) check(cuSeqlens, slots []int32, fresh []bool) error {
	p, count := b.plan, len(cuSeqlens)-1
	wrong := func(field, want string, have any) error { return &InvalidProblemError{field, want, fmt.Sprint(have)} }
	switch {
	case count < 0 || count > int(p.Sequences):
		return wrong("cu_seqlens", fmt.Sprintf("1 to %d offsets", p.Sequences+1), len(cuSeqlens))
	case cuSeqlens[0] != 0:
		return wrong("cu_seqlens", "a first offset of 0", cuSeqlens[0])
	}
	for i := range count {
		if cuSeqlens[i+1] < cuSeqlens[i] {
			return wrong("cu_seqlens", "offsets that do not fall", fmt.Sprintf("%d then %d", cuSeqlens[i], cuSeqlens[i+1]))
		}
		if p.Longest > 0 && cuSeqlens[i+1]-cuSeqlens[i] > p.Longest {
			return wrong("cu_seqlens", fmt.Sprintf("sequences of at most %d tokens", p.Longest), cuSeqlens[i+1]-cuSeqlens[i])
		}
	}
	switch {
	case cuSeqlens[count] > p.Tokens:
		return wrong("cu_seqlens", fmt.Sprintf("a last offset of at most %d tokens", p.Tokens), cuSeqlens[count])
	case len(slots) != count:
		return wrong("read_slots", fmt.Sprintf("%d slots, one a sequence", count), len(slots))
	case len(fresh) != count:
		return wrong("resume", fmt.Sprintf("%d values, one a sequence", count), len(fresh))
	}
	b.turn++
	for i, slot := range slots {
		if slot == p.PadSlot {
			continue
		}
		if slot < 0 || int64(slot) >= b.slots {
			return wrong("read_slots", fmt.Sprintf("0 to %d", b.slots-1), fmt.Sprintf("%d at sequence %d", slot, i))
		}
		if b.seen[slot] == b.turn {
			return wrong("write_slots", "each slot once", fmt.Sprintf("slot %d again at sequence %d", slot, i))
		}
		b.seen[slot] = b.turn
	}
	return nil
}

// Fill puts what a plan and a batch's blob at a device address decide into the arguments of a part, as Scanner.Launch does:
// for those who launch by other means.
func (p *Plan) Fill(args *ScanArgs, part *Part, batch uint64) {
	args.Tokens, args.Heads, args.HeadDim, args.Groups, args.DState = p.Tokens, p.Heads, p.HeadDim, p.Groups, p.DState
	if batch != 0 {
		args.Sequences, args.PadSlot = p.Sequences, p.PadSlot
		args.CuSeqlens, args.ReadSlots = batch, batch+uint64(p.readSlots)
		args.WriteSlots, args.Resume = 0, batch+uint64(p.resume)
		args.SequenceOrder = 0
		if part.order >= 0 {
			args.SequenceOrder = batch + uint64(part.order)
		}
	}
	args.Lanes, args.Rows, args.Chunk = part.Lanes, part.Rows, part.Chunk
	args.SetVectorFlags(p.IO, p.State)
}

// refuse says what is wrong with a call's arguments; sizes that the plan decides are not looked at.
func (p *Plan) refuse(args *ScanArgs, batch uint64) error {
	switch {
	case batch == 0 && len(p.Parts) > 1:
		return &InvalidProblemError{"batch", "the address of a blob, as the plan splits the batch", "0"}
	case batch == 0 && (args.Sequences < 0 || args.Sequences > p.Sequences):
		return &InvalidProblemError{"sequences", fmt.Sprintf("0 to %d", p.Sequences), strconv.Itoa(int(args.Sequences))}
	case batch%4 != 0:
		return &InvalidProblemError{"batch", "a multiple of 4", fmt.Sprintf("%#x", batch)}
	case args.Slots < 0:
		return &InvalidProblemError{"slots", "at least 0", strconv.FormatInt(args.Slots, 10)}
	case p.WorkspaceBytes > 0 && (args.Workspace == 0 || args.WorkspaceBytes < p.WorkspaceBytes):
		return &InvalidProblemError{"workspace", fmt.Sprintf("%d bytes", p.WorkspaceBytes), fmt.Sprint(args.WorkspaceBytes)}
	case p.State == I8 && args.State != 0 && args.StateScale == 0:
		return &InvalidProblemError{"state_scale", "an array, as the state is i8", "none"}
	}
	return p.refuseArrays(args)
}

func (p *Plan) refuseArrays(args *ScanArgs) error {
	dt := p.IO.Bytes()
	if args.Flags&DTFloat32 != 0 {
		dt = F32.Bytes()
	}
	// The stride of an array of one row means nothing.
	row, slot := int64(0), int64(0)
	if p.Tokens > 1 {
		row = int64(p.Heads) * int64(p.HeadDim)
	}
	if args.Slots > 1 {
		slot = int64(p.Heads) * int64(p.HeadDim) * int64(p.DState)
	}
	for _, array := range [...]struct {
		name          string
		address       uint64
		align         int64
		stride, least int64
		optional      bool
	}{
		{"x", args.X, p.IO.Bytes(), args.XStride, 0, false},
		{"y", args.Y, p.IO.Bytes(), args.YStride, row, false},
		{"dt", args.DT, dt, args.DTStride, 0, false},
		{"A", args.A, 4, 0, 0, false},
		{"B", args.B, p.IO.Bytes(), args.BStride, 0, false},
		{"C", args.C, p.IO.Bytes(), args.CStride, 0, false},
		{"z", args.Z, p.IO.Bytes(), args.ZStride, 0, true},
		{"D", args.D, 4, 0, 0, true},
		{"dt_bias", args.DTBias, 4, 0, 0, true},
		{"state", args.State, p.State.Bytes(), args.StateStride, slot, true},
		{"state_scale", args.StateScale, 4, args.StateScaleStride, slot / int64(p.DState), true},
	} {
		if array.address == 0 {
			if !array.optional && p.Tokens > 0 {
				return &InvalidProblemError{array.name, "a device address", "0"}
			}
			continue
		}
		if array.align > 0 && array.address%uint64(array.align) != 0 {
			return &InvalidProblemError{
				array.name, fmt.Sprintf("an address that is a multiple of %d", array.align), fmt.Sprintf("%#x", array.address),
			}
		}
		if array.stride < array.least {
			return &InvalidProblemError{
				array.name + "_stride", fmt.Sprintf("at least %d elements", array.least), strconv.FormatInt(array.stride, 10),
			}
		}
	}
	return nil
}

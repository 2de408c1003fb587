// Package ssmscan launches the state-space scan kernels that pyharness builds and proves.
//
// The package without build tags is plain Go: the argument struct, the manifest, grids and errors. With the build tag
// cuda (and cgo) it also opens the CUDA driver library at run time, loads images and launches them; nothing is linked
// against CUDA, so such a binary starts on a machine without a GPU and says ErrNoCUDA.
package ssmscan

// ScanArgs is the one argument of every kernel entry. The order of the fields is frozen: templates/ssm/args.cuh states
// the same struct for CUDA, and each manifest row carries the layout that CheckLayout compares with this one.
//
// Pointers are device addresses, 0 where an optional array is absent; strides are in elements.
type ScanArgs struct {
	X               uint64 `scan:"x"`
	Z               uint64 `scan:"z"`
	Y               uint64 `scan:"y"`
	DT              uint64 `scan:"dt"`
	A               uint64 `scan:"A"`
	B               uint64 `scan:"B"`
	C               uint64 `scan:"C"`
	D               uint64 `scan:"D"`
	DTBias          uint64 `scan:"dt_bias"`
	State           uint64 `scan:"state"`
	StateScale      uint64 `scan:"state_scale"`
	CuSeqlens       uint64 `scan:"cu_seqlens"`
	ReadSlots       uint64 `scan:"read_slots"`
	WriteSlots      uint64 `scan:"write_slots"`
	Resume          uint64 `scan:"resume"`
	CheckpointSlots uint64 `scan:"checkpoint_slots"`
	SequenceOrder   uint64 `scan:"sequence_order"`
	RoundingKey     uint64 `scan:"rounding_key"`
	Workspace       uint64 `scan:"workspace"`

	XStride          int64 `scan:"x_stride"`
	ZStride          int64 `scan:"z_stride"`
	YStride          int64 `scan:"y_stride"`
	DTStride         int64 `scan:"dt_stride"`
	BStride          int64 `scan:"B_stride"`
	CStride          int64 `scan:"C_stride"`
	StateStride      int64 `scan:"state_stride"`
	StateScaleStride int64 `scan:"state_scale_stride"`
	Slots            int64 `scan:"slots"`
	WorkspaceBytes   int64 `scan:"workspace_bytes"`

	Tokens    int32   `scan:"tokens"`
	Sequences int32   `scan:"sequences"`
	Heads     int32   `scan:"heads"`
	HeadDim   int32   `scan:"head_dim"`
	Groups    int32   `scan:"groups"`
	DState    int32   `scan:"d_state"`
	PadSlot   int32   `scan:"pad_slot"`
	DTMin     float32 `scan:"dt_min"`
	DTMax     float32 `scan:"dt_max"`
	Flags     Flags   `scan:"flags"`
	Lanes     int32   `scan:"lanes"`
	Rows      int32   `scan:"rows"`
	Chunk     int32   `scan:"chunk"`
}

// ScanArgsBytes is the size of ScanArgs, its tail padding included.
const ScanArgsBytes = 288

// Flags are the bits of ScanArgs.Flags.
type Flags uint32

// The Vector bits say that a 16-byte access at any multiple of 16 bytes inside a row of that array is aligned: the
// base address, the token (or slot) stride and the length of every inner row are multiples of 16 bytes.
const (
	Softplus Flags = 1 << iota
	PerColumnA
	DTFloat32
	DTLimit
	VectorX
	VectorZ
	VectorY
	VectorB
	VectorC
	VectorState
)

// vectorBytes is the width of the widest access that a kernel makes.
const vectorBytes = 16

// DType is a storage type by its short name, as ids and manifests spell it.
type DType string

// The storage types of x, z, B, C, y and of the state.
const (
	F32  DType = "f32"
	BF16 DType = "bf16"
	F16  DType = "f16"
	I8   DType = "i8" // the state alone
)

// Bytes is the size of one element, 0 for a type that is not known.
func (t DType) Bytes() int64 {
	switch t {
	case F32:
		return 4
	case BF16, F16:
		return 2
	case I8:
		return 1
	}
	return 0
}

// SetVectorFlags recomputes the Vector bits from the addresses, strides and sizes already in the arguments. Absent
// arrays get no bit.
func (a *ScanArgs) SetVectorFlags(io, state DType) {
	a.Flags &^= VectorX | VectorZ | VectorY | VectorB | VectorC | VectorState
	for _, array := range []struct {
		bit     Flags
		pointer uint64
		stride  int64
		row     int32
		dtype   DType
	}{
		{VectorX, a.X, a.XStride, a.HeadDim, io},
		{VectorZ, a.Z, a.ZStride, a.HeadDim, io},
		{VectorY, a.Y, a.YStride, a.HeadDim, io},
		{VectorB, a.B, a.BStride, a.DState, io},
		{VectorC, a.C, a.CStride, a.DState, io},
		{VectorState, a.State, a.StateStride, a.DState, state},
	} {
		size := array.dtype.Bytes()
		if array.pointer != 0 && array.pointer%vectorBytes == 0 &&
			array.stride*size%vectorBytes == 0 && int64(array.row)*size%vectorBytes == 0 {
			a.Flags |= array.bit
		}
	}
}

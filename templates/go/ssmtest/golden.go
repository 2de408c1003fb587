package ssmtest

import (
	"encoding/binary"
	"fmt"
	"slices"

	"example.com/ssmscan"
	"example.com/ssmscan/internal/golden"
	"example.com/ssmscan/internal/storage"
)

// dense reads rows of a vector's array, each of so many values, a stride apart.
func dense(vector *golden.Vector, name, dtype string, rows, values int) ([]float32, error) {
	view, ok := vector.Arrays[name]
	if !ok {
		return nil, nil
	}
	size := storage.Bytes(dtype)
	stride := int(view.Stride) * size
	if stride == 0 {
		stride = values * size
	}
	var found []float32
	for row := range rows {
		start := view.Offset + row*stride
		buffer := vector.Buffers[view.Buffer]
		if start < 0 || start+values*size > len(buffer) {
			return nil, fmt.Errorf("array %s: row %d lies outside its buffer", name, row)
		}
		decoded, err := storage.Decode(dtype, buffer[start:start+values*size])
		if err != nil {
			return nil, err
		}
		for _, value := range decoded {
			found = append(found, float32(value))
		}
	}
	return found, nil
}

func integers(vector *golden.Vector, name string, count int) ([]int32, error) {
	view, ok := vector.Arrays[name]
	if !ok {
		return nil, nil
	}
	buffer := vector.Buffers[view.Buffer][view.Offset:]
	if len(buffer) < 4*count {
		return nil, fmt.Errorf("array %s: want %d values, have %d bytes", name, count, len(buffer))
	}
	found := make([]int32, count)
	for i := range found {
		found[i] = int32(binary.LittleEndian.Uint32(buffer[4*i:]))
	}
	return found, nil
}

// fromVector makes the problem of a golden vector, defaults filled in.
func fromVector(v *golden.Vector) (*Problem, error) {
	p := &Problem{
		Tokens: int(v.Tokens), Sequences: int(v.Sequences), Heads: int(v.Heads), HeadDim: int(v.HeadDim),
		Groups: int(v.Groups), DState: int(v.DState), Slots: int(v.Slots), PadSlot: v.PadSlot,
		IO: ssmscan.DType(v.IO), StateType: ssmscan.DType(v.State),
		Softplus: slices.Contains(v.Flags, "softplus"), PerColumnA: slices.Contains(v.Flags, "per_column_A"),
		DTFloat32: slices.Contains(v.Flags, "dt_f32"),
	}
	if slices.Contains(v.Flags, "dt_limit") {
		p.Limit = &[2]float32{v.DTMin, v.DTMax}
	}
	dt, valuesOfA := v.IO, 1
	if p.DTFloat32 {
		dt = "f32"
	}
	if p.PerColumnA {
		valuesOfA = p.DState
	}
	for _, array := range []struct {
		name, dtype  string
		to           *[]float32
		rows, values int
	}{
		{"x", v.IO, &p.X, p.Tokens, p.Heads * p.HeadDim}, {"z", v.IO, &p.Z, p.Tokens, p.Heads * p.HeadDim},
		{"dt", dt, &p.DT, p.Tokens, p.Heads}, {"A", "f32", &p.A, 1, p.Heads * valuesOfA},
		{"B", v.IO, &p.B, p.Tokens, p.Groups * p.DState}, {"C", v.IO, &p.C, p.Tokens, p.Groups * p.DState},
		{"D", "f32", &p.D, 1, p.Heads}, {"dt_bias", "f32", &p.DTBias, 1, p.Heads},
		{"state", v.State, &p.State, p.Slots, p.slotValues()},
	} {
		var err error
		if *array.to, err = dense(v, array.name, array.dtype, array.rows, array.values); err != nil {
			return nil, err
		}
	}
	for _, array := range []struct {
		name  string
		to    *[]int32
		count int
	}{
		{"cu_seqlens", &p.CuSeqlens, p.Sequences + 1}, {"read_slots", &p.ReadSlots, p.Sequences},
		{"write_slots", &p.WriteSlots, p.Sequences}, {"checkpoint_slots", &p.CheckpointSlots, p.Tokens},
		{"sequence_order", &p.SequenceOrder, p.Sequences},
	} {
		var err error
		if *array.to, err = integers(v, array.name, array.count); err != nil {
			return nil, err
		}
	}
	p.fillDefaults(v)
	return p, nil
}

func (p *Problem) fillDefaults(v *golden.Vector) {
	if p.CuSeqlens == nil {
		p.CuSeqlens = []int32{0, int32(p.Tokens)}
	}
	if p.ReadSlots == nil {
		for s := range p.Sequences {
			p.ReadSlots = append(p.ReadSlots, int32(s))
		}
	}
	if p.WriteSlots == nil {
		p.WriteSlots = p.ReadSlots
	}
	view, ok := v.Arrays["resume"]
	for s := range p.Sequences {
		p.Resume = append(p.Resume, !ok || v.Buffers[view.Buffer][view.Offset+s] != 0)
	}
}

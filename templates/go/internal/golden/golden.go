// Package golden reads golden vectors: scan problems with the results of the float64 oracle, written by
// pyharness/golden.py. testdata/README.md describes the format.
package golden

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"

	"example.com/ssmscan/internal/storage"
)

const magic = "SSMGOLD1"

// Span is a range of a vector's data.
type Span struct {
	Offset int `json:"offset"`
	Bytes  int `json:"bytes"`
}

// Array is one input: a view that starts Offset bytes into a buffer; Stride is in elements, from token to token or
// slot to slot.
type Array struct {
	Buffer string `json:"buffer"`
	Offset int    `json:"offset"`
	Stride int64  `json:"stride"`
}

// Expect is one result, of which testdata/README.md says what the bounds mean. Rows are the slots that the values of the
// state are for; y has a row for each token.
type Expect struct {
	Span
	Rows []int   `json:"rows"`
	Norm float64 `json:"norm"`
	RTol float64 `json:"rtol"`
	ATol float64 `json:"atol"`

	Values []float64 `json:"-"`
}

// Vector is one problem with its results.
type Vector struct {
	Name      string            `json:"name"`
	About     string            `json:"about"`
	Seed      uint64            `json:"seed"`
	IO        string            `json:"io"`
	State     string            `json:"state"`
	Tokens    int32             `json:"tokens"`
	Sequences int32             `json:"sequences"`
	Heads     int32             `json:"heads"`
	HeadDim   int32             `json:"head_dim"`
	Groups    int32             `json:"groups"`
	DState    int32             `json:"d_state"`
	Slots     int64             `json:"slots"`
	PadSlot   int32             `json:"pad_slot"`
	YStride   int64             `json:"y_stride"`
	Flags     []string          `json:"flags"`
	DTMin     float32           `json:"dt_min"`
	DTMax     float32           `json:"dt_max"`
	Spans     map[string]Span   `json:"buffers"`
	Arrays    map[string]Array  `json:"arrays"`
	Expect    map[string]Expect `json:"expect"`

	Buffers map[string][]byte `json:"-"` // views of the file's bytes
}

// Read takes a file apart; the vector keeps referring to its bytes.
func Read(file []byte) (*Vector, error) {
	if len(file) < 16 || string(file[:8]) != magic {
		return nil, fmt.Errorf("golden: want a file that starts with %s and a header length, have %d bytes of another", magic, len(file))
	}
	length := binary.LittleEndian.Uint64(file[8:])
	if length > uint64(len(file)-16) {
		return nil, fmt.Errorf("golden: want a header of %d bytes, have %d bytes in all: the file is cut", length, len(file))
	}
	vector := &Vector{Buffers: map[string][]byte{}}
	if err := json.Unmarshal(file[16:16+length], vector); err != nil {
		return nil, fmt.Errorf("golden: header: %w", err)
	}
	data := file[16+length:]
	cut := func(name string, span Span) ([]byte, error) {
		if span.Offset < 0 || span.Bytes < 0 || span.Offset > len(data)-span.Bytes {
			return nil, fmt.Errorf("golden: %s: %s lies outside the file's %d bytes of data", vector.Name, name, len(data))
		}
		return data[span.Offset : span.Offset+span.Bytes], nil
	}
	for name, span := range vector.Spans {
		bytes, err := cut(name, span)
		if err != nil {
			return nil, err
		}
		vector.Buffers[name] = bytes
	}
	for name, array := range vector.Arrays {
		if buffer, ok := vector.Buffers[array.Buffer]; !ok || array.Offset < 0 || array.Offset > len(buffer) {
			return nil, fmt.Errorf("golden: %s: array %s lies outside its buffer %q", vector.Name, name, array.Buffer)
		}
	}
	for name, expect := range vector.Expect {
		bytes, err := cut(name, expect.Span)
		if err != nil {
			return nil, err
		}
		expect.Values = make([]float64, len(bytes)/8)
		for i := range expect.Values {
			expect.Values[i] = math.Float64frombits(binary.LittleEndian.Uint64(bytes[8*i:]))
		}
		vector.Expect[name] = expect
	}
	return vector, nil
}

// unit is one unit in the last place of a 16-bit type at a value other than 0, and 0 for f32, whose rounding the bounds
// include.
func unit(dtype string, value float64) float64 {
	if dtype == "f32" {
		return 0
	}
	return storage.Unit(dtype, value)
}

// Errors are an output's distances from what was expected: ||error|| / ||expected||, and the largest
// error / (atol + rtol |expected|).
type Errors struct {
	Norm, Worst float64
}

// Within says whether both distances are inside the bounds.
func (e Errors) Within(expect *Expect) bool { return e.Norm <= expect.Norm && e.Worst <= 1 }

// Compare measures an output of a storage type against its expected values. A NaN, an infinity, a wrong length, and
// anything but 0 where 0 is expected are infinitely far.
func (expect *Expect) Compare(dtype string, out []float64) Errors {
	far := Errors{math.Inf(1), math.Inf(1)}
	if len(out) != len(expect.Values) {
		return far
	}
	var square, scale, worst float64
	for i, want := range expect.Values {
		distance := math.Abs(out[i] - want)
		if math.IsNaN(distance) || want == 0 && distance > 0 {
			return far
		}
		distance -= unit(dtype, want)
		scale += want * want
		if distance > 0 {
			square += distance * distance
			worst = max(worst, distance/(expect.ATol+expect.RTol*math.Abs(want)))
		}
	}
	if square == 0 {
		return Errors{}
	}
	return Errors{math.Sqrt(square / scale), worst}
}

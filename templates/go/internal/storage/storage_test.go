package storage

import (
	"encoding/binary"
	"math"
	"testing"
)

func TestEveryStoredValueSurvives(t *testing.T) {
	for _, dtype := range []string{"bf16", "f16"} {
		for bits := range 1 << 16 {
			stored := binary.LittleEndian.AppendUint16(nil, uint16(bits))
			values, err := Decode(dtype, stored)
			if err != nil {
				t.Fatal(err)
			}
			if math.IsNaN(values[0]) {
				continue
			}
			again, err := Encode(dtype, []float32{float32(values[0])})
			if err != nil || binary.LittleEndian.Uint16(again) != uint16(bits) {
				t.Fatalf("%s %#04x is %v: want the same bits again, have %x (%v)", dtype, bits, values[0], again, err)
			}
		}
	}
}

func TestRoundingAndUnitsWorkedOutByHand(t *testing.T) {
	for _, test := range []struct {
		dtype                string
		value, rounded, unit float64
	}{
		{"bf16", 1, 1, 1.0 / 128}, {"bf16", 1 + 1.0/256, 1, 1.0 / 128}, {"bf16", 1 + 3.0/256, 1 + 1.0/64, 1.0 / 128},
		{"bf16", 1.999, 2, 1.0 / 64}, {"bf16", -0.75, -0.75, 1.0 / 256}, {"bf16", 0x1p-130, 0x1p-130, 0x1p-133},
		{"f16", 1 + 1.0/2048, 1, 1.0 / 1024}, {"f16", 65520, math.Inf(1), 0x1p-24}, {"f16", 65519, 65504, 32},
		{"f16", 0x1p-25, 0, 0x1p-24}, {"f32", 0.1, float64(float32(0.1)), 0x1p-27}, {"bf16", 0, 0, 0x1p-133},
	} {
		if have := Round(test.dtype, test.value); have != test.rounded {
			t.Errorf("%v in %s: want %v, have %v", test.value, test.dtype, test.rounded, have)
		}
		if have := Unit(test.dtype, test.value); have != test.unit {
			t.Errorf("unit of %s at %v: want %v, have %v", test.dtype, test.value, test.unit, have)
		}
	}
	if _, err := Decode("f64", nil); err == nil {
		t.Error("f64: want an error, have none")
	}
}

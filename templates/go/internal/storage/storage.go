// Package storage turns numbers into the storage types of arrays and back: f32, bf16, f16.
package storage

import (
	"encoding/binary"
	"fmt"
	"math"
)

// format is a 16-bit float type: bits of its fraction, and the least exponent of its normal numbers.
type format struct{ fraction, least int }

var formats = map[string]format{"f32": {23, -126}, "bf16": {7, -126}, "f16": {10, -14}}

// Bytes is the size of one element, 0 for a type that is not known.
func Bytes(dtype string) int {
	switch dtype {
	case "f32":
		return 4
	case "bf16", "f16":
		return 2
	case "i8":
		return 1
	}
	return 0
}

// Unit is one unit in the last place of a type at a value that was rounded to the type first.
func Unit(dtype string, value float64) float64 {
	f := formats[dtype]
	value = math.Abs(Round(dtype, value))
	exponent := f.least
	if value > 0 && !math.IsInf(value, 0) {
		exponent = max(math.Ilogb(value), f.least)
	}
	return math.Ldexp(1, exponent-f.fraction)
}

// Round gives the nearest value of a type, ties to even.
func Round(dtype string, value float64) float64 {
	f := formats[dtype]
	if value == 0 || math.IsNaN(value) || math.IsInf(value, 0) {
		return value
	}
	exponent := max(math.Ilogb(value), f.least)
	unit := math.Ldexp(1, exponent-f.fraction)
	rounded := math.RoundToEven(value/unit) * unit
	limit := math.MaxFloat32
	switch dtype {
	case "f16":
		limit = 65504
	case "bf16":
		limit = math.Ldexp(2-1.0/128, 127)
	}
	if math.Abs(rounded) > limit {
		return math.Inf(int(math.Copysign(1, value)))
	}
	return rounded
}

// Decode turns stored elements of a float type into numbers.
func Decode(dtype string, stored []byte) ([]float64, error) {
	size := Bytes(dtype)
	if size != 4 && size != 2 {
		return nil, fmt.Errorf("storage: want elements of f32, bf16 or f16, have %s", dtype)
	}
	values := make([]float64, len(stored)/size)
	for i := range values {
		switch dtype {
		case "f32":
			values[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(stored[4*i:])))
		case "bf16":
			values[i] = float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(stored[2*i:])) << 16))
		case "f16":
			values[i] = halfValue(binary.LittleEndian.Uint16(stored[2*i:]))
		}
	}
	return values, nil
}

func halfValue(bits uint16) float64 {
	sign, exponent, fraction := 1-2*float64(bits>>15), int(bits>>10&31), float64(bits&1023)
	switch {
	case exponent == 31 && fraction != 0:
		return math.NaN()
	case exponent == 31:
		return math.Inf(int(sign))
	case exponent == 0:
		return sign * math.Ldexp(fraction, -24)
	}
	return sign * math.Ldexp(1024+fraction, exponent-25)
}

// Encode rounds numbers to a float type and stores them.
func Encode(dtype string, values []float32) ([]byte, error) {
	var stored []byte
	for _, value := range values {
		rounded := Round(dtype, float64(value))
		switch dtype {
		case "f32":
			stored = binary.LittleEndian.AppendUint32(stored, math.Float32bits(value))
		case "bf16":
			stored = binary.LittleEndian.AppendUint16(stored, uint16(math.Float32bits(float32(rounded))>>16))
		case "f16":
			stored = binary.LittleEndian.AppendUint16(stored, halfBits(rounded))
		default:
			return nil, fmt.Errorf("storage: want elements of f32, bf16 or f16, have %s", dtype)
		}
	}
	return stored, nil
}

// halfBits stores a value that f16 has.
func halfBits(value float64) uint16 {
	var sign uint16
	if math.Signbit(value) {
		sign = 1 << 15
	}
	value = math.Abs(value)
	switch {
	case math.IsNaN(value):
		return sign | 0x7E00
	case math.IsInf(value, 0):
		return sign | 0x7C00
	case value < math.Ldexp(1, -14):
		return sign | uint16(math.Ldexp(value, 24))
	}
	exponent := math.Ilogb(value)
	return sign | uint16(exponent+15)<<10 | uint16(math.Ldexp(value, 10-exponent))&1023
}

package ssmscan

import (
	"testing"
	"unsafe"
)

func TestScanArgsHasItsSizeAndEveryFieldItsNameAndType(t *testing.T) {
	if size := unsafe.Sizeof(ScanArgs{}); size != ScanArgsBytes {
		t.Errorf("ScanArgs: want %d bytes, have %d", ScanArgsBytes, size)
	}
	for i, field := range Layout() {
		if field.Name == "" || field.Type == "" {
			t.Errorf("field %d: want a name and a type, have %q and %q", i, field.Name, field.Type)
		}
	}
}

func TestVectorFlagsFollowAddressStrideAndRow(t *testing.T) {
	aligned := ScanArgs{
		X: 256, Y: 512, B: 1024, C: 2048, State: 4096, HeadDim: 8, DState: 16,
		XStride: 64, YStride: 64, BStride: 128, CStride: 128, StateStride: 8192, Flags: Softplus | VectorZ,
	}
	all := Softplus | VectorX | VectorY | VectorB | VectorC | VectorState
	for _, test := range []struct {
		name   string
		change func(*ScanArgs)
		io     DType
		want   Flags
	}{
		{"all aligned, z absent", func(*ScanArgs) {}, F32, all},
		{"x starts at an odd element", func(a *ScanArgs) { a.X += 4 }, F32, all &^ VectorX},
		{"y has an odd stride", func(a *ScanArgs) { a.YStride = 65 }, F32, all &^ VectorY},
		{"rows of x and y are 3 quads and a half", func(a *ScanArgs) { a.HeadDim = 14 }, F32, all &^ (VectorX | VectorY)},
		{"12 elements are whole quads in f32", func(a *ScanArgs) { a.HeadDim = 12 }, F32, all},
		{"12 elements are not 16 bytes in bf16", func(a *ScanArgs) { a.HeadDim = 12 }, BF16, all &^ (VectorX | VectorY)},
	} {
		args := aligned
		test.change(&args)
		if args.SetVectorFlags(test.io, F32); args.Flags != test.want {
			t.Errorf("%s: want flags %b, have %b", test.name, test.want, args.Flags)
		}
	}
}

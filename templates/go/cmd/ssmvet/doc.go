// Command ssmvet proves and times the images of this package on the GPU that it finds, without Python or a compiler.
//
//	ssmvet [-device 0] [-lane L] [-family F] [-kernels ID,ID] [-out FILE] [-quick]
//
// Each image that the GPU can load is held against a float64 reference on the shapes of other implementations' suites,
// on faults that users met, and on golden vectors; repeated runs have to give the same bits, and a sequence the same bits
// alone as in its batch; guard zones around every array have to stay as they were, and the attributes that the driver
// reports have to be those of the manifest. Then prefill of 1 x 4096 tokens and decode of 16 x 1 are timed. What passed is
// written as JSON, which `invoke package --merge FILE` takes in.
package main

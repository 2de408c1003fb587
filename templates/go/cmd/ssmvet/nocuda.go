//go:build !cuda || !cgo

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "ssmvet: built without the tag cuda or without cgo: build it with CGO_ENABLED=1 go build -tags cuda")
	os.Exit(1)
}

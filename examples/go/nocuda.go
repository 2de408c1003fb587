//go:build !cuda || !cgo

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "built without the tag cuda or without cgo: CGO_ENABLED=1 go run -tags cuda .")
	os.Exit(1)
}

package ssmtest

import (
	"errors"
	"testing"
)

// Run holds an implementation against the reference on every case, each a subtest. A case that the implementation does
// not take is skipped with its reason; that it takes none is a failure.
func Run(t *testing.T, scan Implementation) {
	t.Helper()
	RunCases(t, scan, Cases()...)
}

// RunCases holds an implementation against the reference on some problems.
func RunCases(t *testing.T, scan Implementation, problems ...*Problem) {
	t.Helper()
	taken := 0
	for _, problem := range problems {
		t.Run(problem.Name, func(t *testing.T) {
			have, err := scan(problem)
			if errors.Is(err, ErrUnsupported) {
				t.Skip(err)
			}
			taken++
			if err != nil {
				t.Fatalf("%v: %v", problem, err)
			}
			found, err := Check(problem, Reference(problem), have)
			if err != nil {
				t.Errorf("%v: %v", problem, err)
			}
			t.Log(found)
		})
	}
	if taken == 0 {
		t.Errorf("want an implementation that takes at least one of %d cases, have none taken", len(problems))
	}
}

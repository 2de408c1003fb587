"""SSM_SCAN in ggml's terms, against a loop over flat memory that follows ne and nb and shares nothing with ours."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from pyharness import InvalidProblem, ggml
from pyharness.ggml import Tensor, tensor

F = np.float32
KERNELS = ("recurrent_n16_l4_r32_w1_c32_tiled_f32_sf32", "update_n16_l4_r64_w2_c1_f32_sf32")


def draw(
    seed: int, d_state: int, head_dim: int, heads: int, groups: int, tokens: int, sequences: int, columns: int
) -> dict[str, Tensor]:
    """Operands uniform in -1..1, A too, and two slots more than sequences."""
    rng = np.random.default_rng(seed)

    def uniform(*ne: int) -> Tensor:
        return tensor(rng.uniform(-1, 1, tuple(reversed(ne))).astype(F))

    ids = tensor(rng.permutation(sequences + 2)[:sequences].astype(np.int32))
    return {
        "s": uniform(d_state, head_dim, heads, sequences + 2),
        "x": uniform(head_dim, heads, tokens, sequences),
        "dt": uniform(heads, tokens, sequences),
        "A": uniform(columns, heads),
        "B": uniform(d_state, groups, tokens, sequences),
        "C": uniform(d_state, groups, tokens, sequences),
        "ids": ids,
    }


def at(t: Tensor, *index: int) -> float:
    """An element by its index, fastest axis first, read from the bytes."""
    item = t.memory.itemsize
    nb = t.nb or [item * math.prod(t.ne[:axis]) for axis in range(len(t.ne))]
    where = t.offset + sum(i * b for i, b in zip(index, nb, strict=True))
    kind = "i" if t.memory.dtype == np.int32 else "f"
    return float(struct.unpack_from(kind, t.memory.tobytes(), where)[0])


def reference(o: dict[str, Tensor], K: int) -> np.ndarray[Any, Any]:
    """The op element by element in Python floats."""
    d_state, head_dim, heads, _ = o["s"].ne
    _, groups, tokens, sequences = o["B"].ne
    y = np.zeros((sequences, tokens, heads, head_dim))
    planes = np.zeros((K, sequences, heads, head_dim, d_state))
    for q in range(sequences):
        slot = int(at(o["ids"], q))
        for h in range(heads):
            g = h // (heads // groups)
            for p in range(head_dim):
                S = [at(o["s"], n, p, h, slot) for n in range(d_state)]
                for t in range(tokens):
                    d = math.log1p(math.exp(at(o["dt"], h, t, q)))
                    for n in range(d_state):
                        a = at(o["A"], 0 if o["A"].ne[0] == 1 else n, h)
                        S[n] = S[n] * math.exp(d * a) + at(o["B"], n, g, t, q) * at(o["x"], p, h, t, q) * d
                        y[q, t, h, p] += S[n] * at(o["C"], n, g, t, q)
                    back = tokens - 1 - t
                    if back < K:
                        planes[back, q, h, p] = S
    return np.concatenate((y.ravel(), planes.ravel()))


@pytest.mark.parametrize(("backend", "kernel"), [("oracle", None), *(("emulator", kernel) for kernel in KERNELS)])
@pytest.mark.parametrize("K", [1, 3, 6])
@pytest.mark.parametrize("columns", [1, 16])
def test_the_result_is_y_and_then_the_planes_of_states(backend: str, kernel: str | None, K: int, columns: int) -> None:
    """Four tokens: three planes exist, six do not. NMSE as in ggml's own test of the op, 1e-7, and far below."""
    operands = draw(K, 16, 3, 4, 2, 4, 2, columns)
    result = ggml.ssm_scan(**operands, K=K, kernel=kernel, backend=backend)
    wanted = reference(operands, K)
    assert result.dtype == F
    assert result.shape == (3 * 4 * 4 * 2 + K * 16 * 3 * 4 * 2,)
    np.testing.assert_allclose(result, wanted, rtol=3e-6, atol=3e-6)
    states = result[96:].reshape(K, 2, 4, 3, 16)
    assert (states[4:] == 0).all()
    assert (states[: min(K, 4)] != 0).all()


def test_x_b_and_c_may_be_views_of_one_buffer() -> None:
    """Rows of x, B and C one behind the other, as a model's projection leaves them."""
    operands = draw(5, 8, 4, 4, 2, 5, 3, 1)
    row = 4 * 4 + 2 * 8 * 2
    memory = np.zeros(3 * 5 * row, F)
    shared: dict[str, Tensor] = {}
    start = 0
    for name, inner, count in (("x", 4, 4), ("B", 8, 2), ("C", 8, 2)):
        nb = (4, 4 * inner, 4 * row, 4 * row * 5)
        shared[name] = Tensor(memory, (inner, count, 5, 3), nb, 4 * start)
        shared[name].array[...] = operands[name].array
        start += inner * count
    problem = ggml.problem_of(**operands | shared)
    assert np.shares_memory(problem.x, memory)
    result = ggml.ssm_scan(**operands | shared, backend="oracle")
    assert result.tobytes() == ggml.ssm_scan(**operands, backend="oracle").tobytes()
    np.testing.assert_allclose(result, reference(operands | shared, 1), rtol=3e-6, atol=3e-6)


def test_one_column_of_state_is_not_taken_for_a_scalar_a() -> None:
    operands = draw(6, 1, 2, 3, 1, 3, 2, 1)
    np.testing.assert_allclose(
        ggml.ssm_scan(**operands, backend="oracle"), reference(operands, 1), rtol=3e-6, atol=3e-6
    )


def test_the_pool_is_only_read() -> None:
    operands = draw(7, 16, 2, 2, 1, 3, 2, 1)
    before = operands["s"].memory.tobytes()
    ggml.ssm_scan(**operands, K=2, backend="oracle")
    assert operands["s"].memory.tobytes() == before


@pytest.mark.parametrize(
    ("name", "ne", "message"),
    [
        ("A", (2, 4), r"A: wanted ne \[1 or 16, 4\]"),
        ("dt", (4, 3, 2), r"dt: wanted ne \[4, 4, 2\]"),
        ("C", (16, 1, 4, 2), "B, C: wanted one shape"),
        ("x", (3, 4, 4), "x: wanted 4 axes"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, ne: tuple[int, ...], message: str) -> None:
    operands = draw(8, 16, 3, 4, 2, 4, 2, 1)
    operands[name] = Tensor(np.zeros(math.prod(ne), F), ne)
    with pytest.raises(InvalidProblem, match=message):
        ggml.problem_of(**operands)


def test_a_tensor_must_lie_within_its_memory() -> None:
    with pytest.raises(InvalidProblem, match="its last byte is 44"):
        _ = Tensor(np.zeros(10, F), (2, 5), (4, 8), 4).array

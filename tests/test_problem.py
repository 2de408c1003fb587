"""ScanProblem: every malformed input is refused by name, what is legal is taken, and nothing is changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pyharness import InvalidProblem, ScanProblem
from pyharness.binding import bind, outputs
from pyharness.problem import element_stride
from pyharness.spec import Plan

F = np.float32
TOKENS, HEADS, HEAD_DIM, GROUPS, D_STATE, SLOTS = 6, 4, 3, 2, 5, 8


def i32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def u8(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint8)


def good() -> dict[str, Any]:
    """A legal problem with every array: three sequences, the last of them padding."""
    rng = np.random.default_rng(0)

    def f(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(F)

    return {
        "x": f(TOKENS, HEADS, HEAD_DIM),
        "dt": f(TOKENS, HEADS),
        "A": -np.abs(f(HEADS)),
        "B": f(TOKENS, GROUPS, D_STATE),
        "C": f(TOKENS, GROUPS, D_STATE),
        "D": f(HEADS),
        "dt_bias": f(HEADS),
        "z": f(TOKENS, HEADS, HEAD_DIM),
        "dt_softplus": True,
        "dt_limit": (0.0, 1.0),
        "cu_seqlens": i32(0, 2, 4, 5),
        "state": f(SLOTS, HEADS, HEAD_DIM, D_STATE),
        "state_scale": None,
        "read_slots": i32(1, 2, -1),
        "write_slots": i32(1, 3, 7),
        "resume": u8(1, 1, 0),
        "pad_slot": -1,
        "checkpoint_slots": i32(4, -1, 5, -1, -1, -1),
        "sequence_order": i32(2, 0, 1),
        "rounding_key": np.array([1, 2], np.uint64),
    }


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any = F) -> np.ndarray[Any, Any]:
    memory = np.zeros(4096, np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(memory, shape, strides)


def unaligned(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    return np.zeros(4 * count + 1, np.uint8)[1:].view(F).reshape(shape)


X, BC = (TOKENS, HEADS, HEAD_DIM), (TOKENS, GROUPS, D_STATE)
STATE, SCALE = (SLOTS, HEADS, HEAD_DIM, D_STATE), (SLOTS, HEADS, HEAD_DIM)

MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("list for x", {"x": [1.0]}, "x: wanted a NumPy array, found list"),
    ("None for B", {"B": None}, "B: wanted a NumPy array, found None"),
    ("x of f64", {"x": np.zeros(X)}, "x: wanted dtype f32 or bf16 or f16, found float64"),
    ("x of other byte order", {"x": np.zeros(X, ">f4")}, "x: wanted dtype"),
    ("x of two axes", {"x": np.zeros((TOKENS, 12), F)}, r"x: wanted \[tokens, heads, head_dim\]"),
    ("B of four axes", {"B": np.zeros((TOKENS, 2, 5, 1), F)}, r"B: wanted \[tokens, groups, d_state\]"),
    ("no heads", {"x": np.zeros((TOKENS, 0, 3), F)}, "x: heads must be at least 1"),
    ("no rows", {"x": np.zeros((TOKENS, 4, 0), F)}, "x: head_dim must be at least 1"),
    ("no groups", {"B": np.zeros((TOKENS, 0, 5), F)}, "B: groups must be at least 1"),
    ("no columns", {"B": np.zeros((TOKENS, 2, 0), F)}, "B: d_state must be at least 1"),
    (
        "groups that do not divide",
        {"B": np.zeros((TOKENS, 3, 5), F)},
        "B: groups must divide the 4 heads of x, found 3",
    ),
    ("B of other tokens", {"B": np.zeros((5, 2, 5), F)}, "B: wanted .*tokens = 6"),
    ("C of other dtype", {"C": np.zeros(BC, np.float16)}, "C: wanted dtype f32 .the dtype of x., found float16"),
    ("C of other d_state", {"C": np.zeros((TOKENS, 2, 4), F)}, "C: wanted .*d_state = 5"),
    ("C of other groups", {"C": np.zeros((TOKENS, 4, 5), F)}, "C: wanted .*groups = 2"),
    ("z of other shape", {"z": np.zeros((TOKENS, 4, 4), F)}, "z: wanted .*head_dim = 3"),
    ("z of other dtype", {"z": np.zeros(X, ml_dtypes.bfloat16)}, "z: wanted dtype f32"),
    ("dt of f16 beside f32", {"dt": np.zeros((TOKENS, 4), np.float16)}, "dt: wanted dtype f32"),
    ("dt a row", {"dt": np.zeros((TOKENS, 4, 3), F)}, "dt: wanted .*heads = 4"),
    ("A of io", {"A": np.zeros(4, np.float16)}, "A: wanted dtype f32"),
    ("A of other heads", {"A": np.zeros(3, F)}, "A: wanted .heads = 4."),
    ("A of other columns", {"A": np.zeros((4, 4), F)}, "A: wanted .*d_state = 5"),
    ("A with gaps", {"A": np.zeros(8, F)[::2]}, "A: wanted a contiguous array"),
    ("A repeated", {"A": np.broadcast_to(F(-1), (4,))}, "A: wanted a contiguous array"),
    ("D of f64", {"D": np.zeros(4)}, "D: wanted dtype f32"),
    ("D of rows", {"D": np.zeros((4, 3), F)}, "D: wanted .heads = 4."),
    ("dt_bias of other heads", {"dt_bias": np.zeros(5, F)}, "dt_bias: wanted .heads = 4."),
    ("dt_bias with gaps", {"dt_bias": np.zeros(8, F)[::2]}, "dt_bias: wanted a contiguous array"),
    ("x with gaps inside", {"x": np.zeros((TOKENS, 4, 6), F)[..., ::2]}, "x: wanted every axis after the first"),
    ("x with padded heads", {"x": np.zeros((TOKENS, 4, 4), F)[..., :3]}, "x: wanted every axis after the first"),
    ("B transposed", {"B": np.zeros((TOKENS, 5, 2), F).transpose(0, 2, 1)}, "B: wanted every axis after the first"),
    ("x backwards", {"x": np.zeros(X, F)[::-1]}, "x: wanted a first stride of 0 or more, found -48 bytes"),
    ("C backwards", {"C": np.zeros(BC, F)[::-1]}, "C: wanted a first stride of 0 or more"),
    ("broken stride", {"x": strided(X, (50, 12, 4))}, "x: wanted a first stride of whole 4-byte elements, found 50"),
    ("odd base", {"x": unaligned(X)}, "x: wanted elements at multiples of 4 bytes"),
    ("dt with gaps inside", {"dt": np.zeros((TOKENS, 8), F)[:, ::2]}, "dt: wanted every axis after the first"),
    ("softplus of a number", {"dt_softplus": 1}, "dt_softplus: wanted True or False, found 1"),
    ("limit of one", {"dt_limit": (1.0,)}, "dt_limit: wanted two numbers"),
    ("limit a number", {"dt_limit": 1.0}, "dt_limit: wanted two numbers"),
    ("limit upside down", {"dt_limit": (2.0, 1.0)}, "dt_limit: wanted min <= max"),
    ("limit of NaN", {"dt_limit": (float("nan"), 1.0)}, "dt_limit: wanted min <= max"),
    ("offsets of i64", {"cu_seqlens": np.array([0, 2, 4, 5])}, "cu_seqlens: wanted dtype i32, found int64"),
    ("offsets of two axes", {"cu_seqlens": i32(0, 2, 4, 5)[None]}, "cu_seqlens: wanted .sequences . 1."),
    ("no offsets", {"cu_seqlens": i32()}, "cu_seqlens: wanted sequences . 1 offsets"),
    ("offsets from 1", {"cu_seqlens": i32(1, 2, 4, 5)}, "cu_seqlens: the first offset must be 0, found 1"),
    ("offsets that fall", {"cu_seqlens": i32(0, 4, 2, 5)}, "cu_seqlens: offsets must not fall, found 4 then 2"),
    ("offsets past the tokens", {"cu_seqlens": i32(0, 2, 4, 7)}, "cu_seqlens: the last offset must be at most the 6"),
    ("offsets with gaps", {"cu_seqlens": i32(0, 0, 2, 0, 4, 0, 5, 0)[::2]}, "cu_seqlens: wanted a contiguous"),
    ("state of f64", {"state": np.zeros(STATE)}, "state: wanted dtype f32 or bf16 or f16 or i8"),
    ("state of three axes", {"state": np.zeros(SCALE, F)}, r"state: wanted \[slots, heads, head_dim, d_state\]"),
    ("state of other heads", {"state": np.zeros((8, 2, 3, 5), F)}, "state: wanted .*heads = 4"),
    ("state transposed", {"state": np.zeros((8, 4, 5, 3), F).swapaxes(2, 3)}, "state: wanted every axis after"),
    ("slots that overlap", {"state": strided(STATE, (236, 60, 20, 4))}, "state: slots of 240 bytes must not overlap"),
    ("one slot repeated", {"state": strided(STATE, (0, 60, 20, 4))}, "state: slots of 240 bytes must not overlap"),
    ("slots backwards", {"state": np.zeros(STATE, F)[::-1]}, "state: wanted a first stride of 0 or more"),
    ("scale of an f32 state", {"state_scale": np.zeros(SCALE, F)}, "state_scale: wanted only with an i8 state"),
    ("i8 without scale", {"state": np.zeros(STATE, np.int8)}, "state_scale: an i8 state needs"),
    (
        "scale of other shape",
        {"state": np.zeros(STATE, np.int8), "state_scale": np.zeros((8, 4, 5), F)},
        "state_scale: wanted .*head_dim = 3",
    ),
    (
        "scale of f16",
        {"state": np.zeros(STATE, np.int8), "state_scale": np.zeros(SCALE, np.float16)},
        "state_scale: wanted dtype f32",
    ),
    ("read_slots of i64", {"read_slots": np.array([1, 2, -1])}, "read_slots: wanted dtype i32"),
    ("read_slots of two", {"read_slots": i32(1, 2)}, "read_slots: wanted .sequences = 3."),
    ("write_slots of four", {"write_slots": i32(1, 3, 7, 0)}, "write_slots: wanted .sequences = 3."),
    ("resume of bool", {"resume": np.array([True, True, False])}, "resume: wanted dtype u8"),
    ("resume of 2", {"resume": u8(1, 2, 0)}, "resume: wanted 0 or 1, found 2"),
    ("resume of two", {"resume": u8(1, 1)}, "resume: wanted .sequences = 3."),
    ("read slot too large", {"read_slots": i32(1, 8, -1)}, "read_slots: wanted 0 to 7.*found 8 at sequence 1"),
    ("read slot below", {"read_slots": i32(-2, 2, -1)}, "read_slots: wanted 0 to 7.*found -2 at sequence 0"),
    ("-1 that is not the pad slot", {"pad_slot": 6, "resume": u8(1, 1, 1)}, "read_slots: wanted 0 to 7.*found -1"),
    ("write slot too large", {"write_slots": i32(1, 8, 7)}, "write_slots: wanted -1 to 7.*found 8 at sequence 1"),
    ("write slot below", {"write_slots": i32(1, -2, 7)}, "write_slots: wanted -1 to 7.*found -2"),
    (
        "fresh read slot that is written to",
        {"read_slots": i32(8, 2, -1), "resume": u8(0, 1, 0), "write_slots": None},
        "read_slots, which write_slots defaults to.*found 8 at sequence 0",
    ),
    (
        "too few slots for the default",
        {"state": np.zeros((2, 4, 3, 5), F), "read_slots": None, "write_slots": None, "checkpoint_slots": None},
        "read_slots .by default 0, 1, 2.*found 2 at sequence 2",
    ),
    ("checkpoint too large", {"checkpoint_slots": i32(8, -1, -1, -1, -1, -1)}, "checkpoint_slots: wanted -1 or 0 to 7"),
    ("checkpoint below", {"checkpoint_slots": i32(-2, -1, -1, -1, -1, -1)}, "checkpoint_slots: wanted -1 or 0 to 7"),
    ("checkpoints of a sequence", {"checkpoint_slots": i32(4, 5, 6)}, "checkpoint_slots: wanted .tokens = 6."),
    (
        "checkpoint of padding",
        {"checkpoint_slots": i32(-1, -1, -1, -1, 6, -1)},
        "checkpoint_slots: token 4 belongs to no",
    ),
    (
        "checkpoint in the tail",
        {"checkpoint_slots": i32(-1, -1, -1, -1, -1, 6)},
        "checkpoint_slots: token 5 belongs to no",
    ),
    (
        "two finals in a slot",
        {"write_slots": i32(3, 3, 7)},
        "write_slots, checkpoint_slots: .*slot 3 stored to 2 times",
    ),
    ("two checkpoints in a slot", {"checkpoint_slots": i32(4, -1, 4, -1, -1, -1)}, "slot 4 stored to 2 times"),
    ("final and checkpoint", {"checkpoint_slots": i32(3, -1, -1, -1, -1, -1)}, "slot 3 stored to 2 times"),
    ("final over a live read", {"write_slots": i32(2, 3, 7)}, "read_slots: sequence 1 reads slot 2"),
    ("checkpoint over a live read", {"checkpoint_slots": i32(2, -1, -1, -1, -1, -1)}, "sequence 1 reads slot 2"),
    ("checkpoint over its own read", {"checkpoint_slots": i32(-1, -1, 2, -1, -1, -1)}, "sequence 1 reads slot 2"),
    ("shared read, one in place", {"read_slots": i32(1, 1, -1)}, "read_slots: sequence 1 reads slot 1"),
    ("order of i64", {"sequence_order": np.array([2, 0, 1])}, "sequence_order: wanted dtype i32"),
    ("order with a repeat", {"sequence_order": i32(2, 0, 0)}, "sequence_order: wanted a permutation of 0 to 2"),
    ("order too short", {"sequence_order": i32(0, 1)}, "sequence_order: wanted .sequences = 3."),
    ("key of i64", {"rounding_key": np.array([1, 2])}, "rounding_key: wanted dtype u64"),
    ("key of three", {"rounding_key": np.zeros(3, np.uint64)}, "rounding_key: wanted .seed and step = 2."),
    ("pad slot of float", {"pad_slot": 0.5}, "pad_slot: wanted an integer"),
    ("pad slot of 64 bits", {"pad_slot": 2**31}, "pad_slot: wanted a 32-bit integer"),
]


@pytest.mark.parametrize(("change", "message"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        ScanProblem(**(good() | change))


@pytest.mark.parametrize("name", ["read_slots", "write_slots", "checkpoint_slots", "state_scale"])
def test_slots_without_a_state_are_refused(name: str) -> None:
    plain = good() | dict.fromkeys(("state", "read_slots", "write_slots", "resume", "checkpoint_slots"))
    value = np.zeros(SCALE, F) if name == "state_scale" else i32(0, 0, 0)
    with pytest.raises(InvalidProblem, match=f"{name}: needs a state"):
        ScanProblem(**(plain | {name: value}))


def test_resuming_without_a_state_is_refused_and_zeros_are_taken() -> None:
    plain = good() | dict.fromkeys(("state", "read_slots", "write_slots", "checkpoint_slots"))
    with pytest.raises(InvalidProblem, match="resume: sequence 1 resumes, but there is no state"):
        ScanProblem(**(plain | {"resume": u8(0, 1, 0)}))
    assert not ScanProblem(**(plain | {"resume": u8(0, 0, 0)})).resumes.any()


def test_an_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="dt_limit"):
        ScanProblem(**(good() | {"dt_limit": (1.0, 0.0)}))


def test_checking_keeps_the_arrays_and_their_bytes() -> None:
    given = good()
    before = {name: value.tobytes() for name, value in given.items() if isinstance(value, np.ndarray)}
    problem = ScanProblem(**given)
    for field in dataclasses.fields(problem):
        assert getattr(problem, field.name) is given[field.name]
    assert {name: given[name].tobytes() for name in before} == before


def test_sizes_and_defaults_are_derived() -> None:
    problem = ScanProblem(**good())
    g = problem.geometry
    assert (g.tokens, g.sequences, g.heads, g.head_dim, g.groups, g.d_state) == (6, 3, 4, 3, 2, 5)
    assert (problem.io, problem.state_dtype, problem.dt_is_f32, problem.per_column_a) == ("f32", "f32", True, False)
    assert problem.padding.tolist() == [False, False, True]
    assert problem.live_tokens.tolist() == [True] * 4 + [False] * 2
    assert np.flatnonzero(problem.written).tolist() == [1, 3, 4, 5]
    plain = ScanProblem(
        **(
            good()
            | dict.fromkeys(("cu_seqlens", "state", "read_slots", "write_slots", "resume"))
            | dict.fromkeys(("checkpoint_slots", "sequence_order"))
            | {"pad_slot": 0}
        )
    )
    assert (plain.sequences, plain.slots, plain.padding.tolist()) == (1, 1, [False])
    assert plain.resumes.tolist() == [False]
    assert plain.lengths.tolist() == [6]


def test_default_slots_are_the_sequences_and_the_pad_slot_counts_among_them() -> None:
    change = {"read_slots": None, "write_slots": None, "resume": None, "checkpoint_slots": None, "pad_slot": 1}
    problem = ScanProblem(**(good() | change))
    assert problem.padding.tolist() == [False, True, False]
    assert problem.resumes.all()
    assert np.flatnonzero(problem.written).tolist() == [0, 2]


def test_padding_is_decided_before_freshness_and_its_write_slot_is_not_looked_at() -> None:
    change = {"write_slots": i32(1, 3, 99), "resume": u8(1, 1, 0)}
    assert ScanProblem(**(good() | change)).padding[2]


def test_the_read_slot_of_a_fresh_sequence_may_be_anything_and_written_by_another() -> None:
    change = {"read_slots": i32(1, 99, -1), "resume": u8(1, 0, 0)}
    assert ScanProblem(**(good() | change)).written[3]
    change = {"read_slots": i32(1, 2, -1), "write_slots": i32(2, 3, 7), "resume": u8(1, 0, 0)}
    assert ScanProblem(**(good() | change)).written[2]


def test_several_sequences_may_start_from_one_slot() -> None:
    change = {"read_slots": i32(2, 2, -1), "write_slots": i32(1, 3, 7)}
    assert ScanProblem(**(good() | change)).resolved_read.tolist() == [2, 2, -1]


def test_minus_one_discards_any_number_of_states() -> None:
    assert not ScanProblem(**(good() | {"write_slots": i32(-1, -1, -1), "checkpoint_slots": None})).written.any()


def test_views_of_one_row_and_repeated_rows_are_taken() -> None:
    row = np.zeros((TOKENS, 40), F)
    x = np.lib.stride_tricks.as_strided(row[:, 1:], X, (160, 12, 4))
    B = np.lib.stride_tricks.as_strided(row[:, 13:], BC, (160, 20, 4))
    C = np.broadcast_to(np.zeros((2, 5), F), BC)
    problem = ScanProblem(**(good() | {"x": x, "B": B, "C": C}))
    assert [element_stride(a) for a in (problem.x, problem.B, problem.C)] == [40, 40, 0]


def test_the_stride_of_an_axis_of_one_means_nothing() -> None:
    one = np.lib.stride_tricks.as_strided(np.zeros(64, F), (TOKENS, 1, 1), (4, 999, 777))
    problem = ScanProblem(one, np.zeros((TOKENS, 1), F), -np.ones(1, F), one, one)
    assert problem.heads == problem.head_dim == problem.d_state == 1


def test_no_tokens_and_no_sequences_are_legal() -> None:
    empty = np.zeros((0, 2, 3), F)
    problem = ScanProblem(empty, np.zeros((0, 2), F), -np.ones(2, F), empty[:, :1], empty[:, :1], cu_seqlens=i32(0))
    assert (problem.tokens, problem.sequences) == (0, 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_io_takes_dt_of_either_type(dtype: Any) -> None:
    low = {name: good()[name].astype(dtype) for name in ("x", "B", "C", "z")}
    assert ScanProblem(**(good() | low)).dt_is_f32
    assert not ScanProblem(**(good() | low | {"dt": good()["dt"].astype(dtype)})).dt_is_f32


def test_vector_flags_need_base_stride_and_rows_at_sixteen_bytes() -> None:
    from pyharness.args import SCAN_ARGS, Flag

    def flags(problem: ScanProblem, base: int = 4096) -> Flag:
        binding = bind(problem, Plan(()), outputs(problem))
        packed = binding.pack({buffer.name: base for buffer in binding.buffers})
        return Flag(int(np.frombuffer(packed, SCAN_ARGS)[0]["flags"]))

    x, b = np.zeros((5, 2, 8), F), np.zeros((5, 1, 4), F)
    problem = ScanProblem(x, np.zeros((5, 2), F), -np.ones(2, F), b, b)
    vectors = Flag.VECTOR_X | Flag.VECTOR_Y | Flag.VECTOR_B | Flag.VECTOR_C | Flag.VECTOR_STATE
    assert flags(problem) == vectors | Flag.SOFTPLUS | Flag.DT_F32
    assert not flags(problem, 4100) & vectors
    gapped = dataclasses.replace(problem, x=np.zeros((5, 18), F)[:, :16].reshape(5, 2, 8))
    assert flags(gapped) & vectors == vectors & ~Flag.VECTOR_X
    narrow = dataclasses.replace(problem, B=np.zeros((5, 1, 6), F), C=np.zeros((5, 1, 6), F))
    assert flags(narrow) & vectors == Flag.VECTOR_X | Flag.VECTOR_Y


def test_a_copied_pool_keeps_strides_alignment_and_values() -> None:
    state = np.random.default_rng(1).standard_normal((SLOTS, 300)).astype(F)
    pool = np.lib.stride_tricks.as_strided(state[:, 3:], STATE, (1200, 60, 20, 4))
    copy = outputs(ScanProblem(**(good() | {"state": pool}))).state
    assert copy.strides == pool.strides
    assert (copy.ctypes.data - pool.ctypes.data) % 16 == 0
    assert np.array_equal(copy, pool)
    assert not np.shares_memory(copy, pool)

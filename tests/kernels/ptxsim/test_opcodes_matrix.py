"""ldmatrix, movmatrix and mma against loops over the elements of the fragments.

Which element a lane holds is written out as in the PTX ISA: "matrix fragments for mma",
one formula per shape, with group = lane // 4 and thread = lane % 4.
"""

import itertools

import numpy as np
import pytest
from exact import bits_of, to_type, values_of
from rows import raises_at_its_line, refuses_made_up_modifiers, untested
from snippets import run_snippet

LANES = range(32)
LINES = []  # all that the tests of this file run


def lines(*texts):
    LINES.append("\n".join(texts))
    return LINES[-1]


# ---- ldmatrix and movmatrix


def names(letter, count):
    return [f"%{letter}{k}" for k in range(count)]


def braces(registers):
    return f"{{{', '.join(registers)}}}"


def load(count, trans, shared):
    """32 rows of 16 bytes go to shared memory, at `stride` bytes from each other; row k
    of the matrices is row `%at` of lane k."""
    return lines(
        ".reg .b32 %w, %r, %v<4>; .reg .b64 %q; mul.wide.u32 %q, %i, 16;"
        "add.s64 %q, %q, %m; mad.lo.u32 %w, %i, 48, %shared;",
        "ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%q];",
        "st.shared.v4.u32 [%w], {%v0, %v1, %v2, %v3}; bar.warp.sync -1;"
        "mad.lo.u32 %r, %at, 48, %shared;",
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.{shared}.b16 "
        f"{braces(names('d', count))}, [%r];",
    )


LOADS = {
    (count, trans): load(count, trans, "shared::cta" if count == 2 else "shared")
    for count in (1, 2, 4)
    for trans in (False, True)
}


@pytest.mark.parametrize(("count", "trans"), LOADS)
def test_ldmatrix(count, trans):
    """Lane l gets elements 2 (l % 4), 2 (l % 4) + 1 of row l // 4 of every matrix."""
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    at = np.random.default_rng(count).permutation(32).astype(np.int32)
    outs = {f"d{k}": np.uint32 for k in range(count)}
    got = run_snippet(
        LOADS[count, trans], outs, at=at, shared=48 * 32, buffers={"m": rows.copy()}
    )
    for k in range(count):
        matrix = rows[at[8 * k : 8 * k + 8]]
        for lane in LANES:
            row, column = lane // 4, 2 * (lane % 4)
            if trans:
                pair = matrix[column, row], matrix[column + 1, row]
            else:
                pair = matrix[row, column], matrix[row, column + 1]
            assert got[f"d{k}"][lane] == int(pair[0]) | int(pair[1]) << 16, (k, lane)


MOVE = lines("movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;")


def test_movmatrix():
    """Two warps, each with a matrix of its own."""
    matrices = np.random.default_rng(0).integers(0, 65536, (2, 8, 8), np.uint16)
    low, high = matrices.reshape(2, 32, 2).astype(np.uint32).transpose(2, 0, 1)
    got = run_snippet(MOVE, np.uint32, a=(low | high << 16).reshape(-1))
    for lane in range(64):
        matrix, row, column = matrices[lane // 32], lane % 32 // 4, 2 * (lane % 4)
        pair = matrix[column, row], matrix[column + 1, row]
        assert got[lane] == int(pair[0]) | int(pair[1]) << 16, lane


# ---- mma: which (row, column) is element i of a lane

FRAGMENTS = {
    # shape, bits of an element of A: (A, B), each function(group, thread, i)
    ("m16n8k8", 16): (
        lambda g, t, i: (g if i < 2 else g + 8, 2 * t + (i & 1)),
        lambda g, t, i: (2 * t + i, g),
    ),
    ("m16n8k16", 16): (
        lambda g, t, i: (
            g if i < 2 or 4 <= i < 6 else g + 8,
            2 * t + (i & 1) + (8 if i >= 4 else 0),
        ),
        lambda g, t, i: (2 * t + (i & 1) + (8 if i >= 2 else 0), g),
    ),
    ("m16n8k16", 8): (
        lambda g, t, i: (g if i < 4 else g + 8, 4 * t + (i & 3)),
        lambda g, t, i: (4 * t + i, g),
    ),
    ("m16n8k32", 8): (
        lambda g, t, i: (
            g if i < 4 or 8 <= i < 12 else g + 8,
            4 * t + (i & 3) + (16 if i >= 8 else 0),
        ),
        lambda g, t, i: (4 * t + (i & 3) + (16 if i >= 4 else 0), g),
    ),
}


def of_c(g, t, i):
    return (g if i < 2 else g + 8), 2 * t + (i & 1)


def fragment(matrix, place, elements):
    """(32, elements): what every lane holds of a matrix."""
    held = [
        [matrix[place(lane // 4, lane % 4, i)] for i in range(elements)]
        for lane in LANES
    ]
    return np.array(held)


def registers(letter, elements, bits):
    """The elements of the lanes in 32-bit registers, the first one lowest."""
    words = np.ascontiguousarray(elements.astype(f"u{bits // 8}")).view(np.uint32)
    return {f"{letter}{k}": words[:, k] for k in range(words.shape[1])}


FLOAT_TYPES = [("f32", "f16"), ("f16", "f16"), ("f32", "bf16")]
CASES = [
    (shape, d, a, a, "")
    for shape in ("m16n8k8", "m16n8k16")
    for d, a in FLOAT_TYPES
] + [
    (shape, "s32", a, b, satfinite)
    for shape in ("m16n8k16", "m16n8k32")
    for a, b in itertools.product(("s8", "u8"), repeat=2)
    for satfinite in ("", ".satfinite")
]  # fmt: skip


def bits_of_element(type_):
    return int(type_.lstrip("bfsu"))


def counts(shape, a):
    """Registers of A, B and, with two f16 in one, of C."""
    k = int(shape.partition("k")[2])
    return 16 * k * bits_of_element(a) // 1024, 8 * k * bits_of_element(a) // 1024


def multiply(shape, d, a, b, satfinite):
    of_a, of_b = counts(shape, a)
    of_d = 2 if d == "f16" else 4
    return lines(
        f"mma.sync.aligned.{shape}.row.col{satfinite}.{d}.{a}.{b}.{d}",
        f"{braces(names('d', of_d))}, {braces(names('a', of_a))},",
        f"{braces(names('b', of_b))}, {braces(names('c', of_d))};",
    )


PRODUCTS = {case: multiply(*case) for case in CASES}


def run_mma(case, a, b, c):
    """(16, 8): D of the matrices A (16, k), B (k, 8), C, given as values."""
    shape, d_type, a_type, b_type, _ = case
    width = bits_of_element(a_type)
    place_a, place_b = FRAGMENTS[shape, width]
    of_a, of_b = (n * 32 // width for n in counts(shape, a_type))
    inputs = registers("a", fragment(stored(a, a_type), place_a, of_a), width)
    inputs |= registers("b", fragment(stored(b, b_type), place_b, of_b), width)
    inputs |= registers(
        "c", fragment(stored(c, d_type), of_c, 4), bits_of_element(d_type)
    )
    if d_type != "f16":
        dtype = {"f32": np.float32, "s32": np.int32}[d_type]
        inputs |= {n: x.view(dtype) for n, x in inputs.items() if n[0] == "c"}
    of_d = 2 if d_type == "f16" else 4
    dtype = {"f32": np.float32, "s32": np.int32, "f16": np.uint32}[d_type]
    got = run_snippet(PRODUCTS[case], {f"d{k}": dtype for k in range(of_d)}, **inputs)
    words = np.stack([got[f"d{k}"] for k in range(of_d)], axis=1)
    if d_type == "f16":
        words = values_of(words.view(np.uint16), "f16")
    result = np.zeros((16, 8), words.dtype)
    for lane, i in itertools.product(LANES, range(4)):
        result[of_c(lane // 4, lane % 4, i)] = words[lane, i]
    return result


def stored(values, type_):
    """The bits of the elements."""
    if type_ == "f32":
        return values.astype(np.float32).view(np.uint32)
    if type_ in ("f16", "bf16"):
        return bits_of(values, type_)
    return values.astype(np.int64) & (2 ** bits_of_element(type_) - 1)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_products_of_whole_numbers_are_exact(case):
    """No rounding: every order of the sums gives the same."""
    shape, _, a_type, b_type, _ = case
    k, rng = int(shape.partition("k")[2]), np.random.default_rng(len(shape))
    low = {"u8": (0, 256), "s8": (-128, 128)}
    a = rng.integers(*low.get(a_type, (-8, 9)), (16, k))
    b = rng.integers(*low.get(b_type, (-8, 9)), (k, 8))
    c = rng.integers(-100, 100, (16, 8))
    got = run_mma(case, a, b, c)
    assert np.array_equal(got, a @ b + c)


@pytest.mark.parametrize("case", [c for c in CASES if c[1] == "s32"], ids="-".join)
def test_integer_sums_wrap_around_or_stop(case):
    shape, _, a_type, b_type, satfinite = case
    k = int(shape.partition("k")[2])
    top = {"u8": 255, "s8": 127}
    a, b = np.full((16, k), top[a_type]), np.full((k, 8), top[b_type])
    c = np.full((16, 8), 2**31 - 5, np.int64)
    if a_type == "s8":
        a[8:], c[8:] = -128, -(2**31)
    exact = a @ b + c
    stopped = np.clip(exact, -(2**31), 2**31 - 1)
    want = stopped if satfinite else exact.astype(np.int32)
    assert (exact != stopped).all()
    assert np.array_equal(run_mma(case, a, b, c), want)


@pytest.mark.parametrize("case", [c for c in CASES if c[1] != "s32"], ids="-".join)
def test_products_of_floats_are_close(case):
    """Within the rounding of k + 1 sums in float32, and of the result."""
    shape, d_type, a_type, *_ = case
    k, rng = int(shape.partition("k")[2]), np.random.default_rng(1)
    a, b = (to_type(a_type, rng.standard_normal(s)) for s in ((16, k), (k, 8)))
    c = to_type(d_type, rng.standard_normal((16, 8)))
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    unit = 2.0**-11 if d_type == "f16" else 2.0**-24
    allowed = (k + 1) * 2.0**-23 * size + unit * np.abs(a @ b + c)
    assert (np.abs(run_mma(case, a, b, c) - (a @ b + c)) <= allowed).all()


def test_infinities_and_nans_stay_in_their_row_and_column():
    a, b, c = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    a[3, 7], b[2, 5], c[9, 1] = np.inf, np.nan, -np.inf
    a[11, 0], b[0, 6] = np.inf, 0.0
    got = run_mma(("m16n8k16", "f32", "f16", "f16", ""), a, b, c)
    want = np.full((16, 8), 16.0)
    want[:, 6] = 15.0
    want[3], want[11], want[9, 1] = np.inf, np.inf, -np.inf
    want[:, 5], want[11, 6] = np.nan, np.nan
    assert np.array_equal(got, want, equal_nan=True)


def test_every_variant_has_a_row():
    assert untested("matrix", LINES) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers(LINES)


def mma_of(types):
    operands = ", ".join(braces(names("r", n)) for n in (4, 2, 1, 4))
    return f"mma.sync.aligned.{types} {operands};"


@pytest.mark.parametrize(
    "ptx",
    [
        "ldmatrix.sync.aligned.m8n8.x1.b16 {%r0}, [%r1];",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r0, %r1, %r2}, [%r1];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r0}, [%r1];",
        "ldmatrix.sync.aligned.m8n8.x1.shared::cluster.b16 {%r0}, [%r1];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r0};",
        "movmatrix.sync.aligned.m8n8.b16 %r0, %r1;",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 %r0, %r1, %r2, %r3;",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 %r0, %r1, %r2, %r3;",
        mma_of("m8n8k16.row.col.s32.s8.s8.s32"),
        mma_of("m16n8k16.col.row.f32.f16.f16.f32"),
        mma_of("m16n8k8.row.col.f32.tf32.tf32.f32"),
        mma_of("m16n8k8.row.col.f32.f16.bf16.f32"),
        mma_of("m16n8k8.row.col.f16.bf16.bf16.f16"),
        mma_of("m16n8k8.row.col.f32.f16.f16.f16"),
        mma_of("m16n8k8.row.col.s32.f16.f16.s32"),
        mma_of("m16n8k8.row.col.satfinite.f32.f16.f16.f32"),
        mma_of("m16n8k16.row.col.s32.s8.f16.s32"),
        mma_of("m16n8k16.row.col.s32.s4.s4.s32"),
        mma_of("m16n8k32.row.col.f32.e4m3.e4m3.f32"),
        mma_of("m16n8k16.row.col.f64.f64.f64.f64"),
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

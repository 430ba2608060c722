"""cvt: every pair of types and every rounding, against exact fractions."""

import math

import numpy as np
import pytest
from exact import FORMATS, to_type
from rows import (
    FLOATS,
    INTEGERS,
    ROUNDINGS,
    Row,
    edge_values,
    held,
    integers,
    raises_at_its_line,
    random_values,
    refuses_made_up_modifiers,
    untested,
)

WHOLE = (*INTEGERS, "u8", "s8")
SMALL = ("f16", "bf16")
REAL = FLOATS + SMALL
WIDTH = {t: int(t[1:]) for t in WHOLE}
TO_WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def limits(type_):
    top = 2 ** (WIDTH[type_] - (type_[0] == "s"))
    return (-top if type_[0] == "s" else 0), top - 1


def row(lines, outs, source, want, edges=None):
    return Row(
        "".join(lines),
        outs,
        want,
        {"a": source},
        {"a": edges} if edges is not None else {},
    )


# ---- integers to integers


def between_integers(source):
    lines = [f"cvt.{t}.{source} %d_{t}, %a;" for t in WHOLE]
    lines += [f"cvt.sat.{t}.{source} %s_{t}, %a;" for t in WHOLE]
    outs = {f"{d}_{t}": t for d in "ds" for t in WHOLE}

    def want(a):
        clamped = {t: np.clip(a, *limits(t)) for t in WHOLE}
        return {f"d_{t}": a for t in WHOLE} | {f"s_{t}": x for t, x in clamped.items()}

    return row(lines, outs, source, want)


ROWS = [between_integers(t) for t in WHOLE]

# ---- integers to floats


def saturated(x):
    return np.where(x > 0, np.minimum(x, 1.0), 0.0)


def close_to_ties(source, result):
    """Integers around those halfway between two numbers of the result type."""
    bits, low, high = FORMATS[result][0], *limits(source)
    tops = [2**k for k in range(bits, WIDTH[source])]
    around = [
        t + n * t // 2**bits + e for t in tops for n in (1, 3) for e in (-1, 0, 1)
    ]
    numbers = [s * n for n in around for s in (1, -1) if low <= s * n <= high]
    some = held(edge_values(source), source).tolist()
    return integers([*numbers, *some, 65519, 65520, 65535], source)


def from_integer(source, result):
    modes = ROUNDINGS if WIDTH[source] < 64 else ("rn",)
    lines = [f"cvt.{m}.{result}.{source} %d_{m}, %a;" for m in modes]
    outs = {f"d_{m}": result for m in modes}
    if result != "bf16":
        lines.append(f"cvt.rn.sat.{result}.{source} %s, %a;")
        outs["s"] = result

    def want(a):
        results = {f"d_{m}": to_type(result, a, m) for m in modes}
        return results | {"s": saturated(results["d_rn"].astype(float))}

    return row(lines, outs, source, want, close_to_ties(source, result))


ROWS += [from_integer(s, r) for s in WHOLE for r in REAL]

# ---- floats to integers


def of_nan(source, result):
    """PTX ISA, cvt: zero, or the top bit where a 64-bit type takes part."""
    wide = source == "f64" or WIDTH[result] == 64
    return 2 ** (WIDTH[result] - 1) if wide else 0


def to_whole(x, rounding, source, result):
    low, high = limits(result)

    def one(value):
        if math.isnan(value):
            return of_nan(source, result)
        if math.isinf(value):
            return low if value < 0 else high
        return min(max(TO_WHOLE[rounding](value), low), high)

    return np.array([one(v) for v in x.tolist()], object)


def close_to_limits(source, result):
    low, high = limits(result)
    numbers = [m * n for n in (low, high + 1) for m in (1, 1 - 2**-8, 1 - 2**-20, 1.5)]
    numbers += [n + e for n in (-3, -2, -1, 0, 1, 2) for e in (0.25, 0.5, 0.75)]
    numbers += [m + e for m in (low, high) if WIDTH[result] < 32 for e in (-0.5, 0.5)]
    return with_edges(numbers, source)


def with_edges(numbers, type_):
    """The numbers as the type holds them, and its edge values."""
    numbers = np.array(numbers, np.float64)
    if type_ == "f16":
        with np.errstate(over="ignore"):
            more = numbers.astype(np.float16).view(np.uint16)
    elif type_ == "bf16":
        more = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        more = numbers.astype({"f32": np.float32, "f64": np.float64}[type_])
    return np.concatenate([more, edge_values(type_)])


def to_integer(source, result):
    lines = [f"cvt.{m}.{result}.{source} %d_{m}, %a;" for m in TO_WHOLE]
    lines.append(f"cvt.rzi.sat.{result}.{source} %s, %a;")
    outs = {f"d_{m}": result for m in TO_WHOLE} | {"s": result}

    def want(a):
        results = {f"d_{m}": to_whole(a, m, source, result) for m in TO_WHOLE}
        return results | {"s": results["d_rzi"]}

    return row(lines, outs, source, want, close_to_limits(source, result))


ROWS += [to_integer(s, r) for s in REAL for r in WHOLE]

# ---- floats to floats


def relu(x):
    return np.where(x <= 0, 0.0, x)


def close_to_numbers(source, result):
    """Numbers of the result type, those halfway to the next, and their neighbours."""
    rng = np.random.default_rng(5)
    some = np.concatenate([edge_values(result), random_values(result, rng, 60)])
    some = held(some, result).astype(np.float64)
    some = some[np.isfinite(some)]
    bits, lowest, _ = FORMATS[result]
    size = np.maximum(np.abs(some), 2.0**lowest)
    half = 2.0 ** (np.floor(np.log2(size)) - bits)
    points = [some + k * half for k in (0, 1)]
    points += [np.nextafter(p, s * np.inf) for p in points for s in (1, -1)]
    points += [p + s * half * 2.0**-14 for p in points[:2] for s in (1, -1)]
    with np.errstate(over="ignore"):
        return with_edges(np.concatenate(points), source)


def narrowing(source, result):
    modes, types = ROUNDINGS, f"{result}.{source}"
    lines = [f"cvt.{m}.{types} %d_{m}, %a;" for m in modes]
    outs = {f"d_{m}": result for m in modes}
    if "bf16" not in (source, result):
        lines += [f"cvt.{m}.sat.{types} %s_{m}, %a;" for m in modes]
        outs |= {f"s_{m}": result for m in modes}
    if source == "f32" and result in SMALL:
        lines += [f"cvt.{m}.relu.{types} %r_{m}, %a;" for m in ("rn", "rz")]
        outs |= {f"r_{m}": result for m in ("rn", "rz")}

    def want(a):
        results = {f"d_{m}": to_type(result, a, m) for m in modes}
        results |= {f"s_{m}": saturated(results[f"d_{m}"]) for m in modes}
        return results | {f"r_{m}": relu(results[f"d_{m}"]) for m in modes}

    return row(lines, outs, source, want, close_to_numbers(source, result))


def widening(source, result):
    """Exact; also from a type to itself."""
    lines = [f"cvt.{result}.{source} %d, %a;"]
    outs = {"d": result}
    if "bf16" not in (source, result):
        lines.append(f"cvt.sat.{result}.{source} %s, %a;")
        outs["s"] = result
    return row(lines, outs, source, lambda a: {"d": a, "s": saturated(a)})


def to_whole_float(type_):
    """Signs stay, also of zeros; the next number may be infinite."""
    functions = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    lines = [f"cvt.{m}.{type_}.{type_} %d_{m}, %a;" for m in functions]
    outs = {f"d_{m}": type_ for m in functions}

    def want(a):
        return {f"d_{m}": function(a) for m, function in functions.items()}

    return row(lines, outs, type_, want, with_edges([0.25, -0.5, 7.5, -8.5], type_))


NARROWING = [("f64", "f32"), ("f64", "f16"), ("f64", "bf16"), ("f32", "f16")]
NARROWING += [("f32", "bf16"), ("f16", "bf16"), ("bf16", "f16")]
ROWS += [narrowing(*pair) for pair in NARROWING]
ROWS += [widening(s, r) for s in REAL for r in REAL if (s, r) not in NARROWING]
ROWS += [to_whole_float(t) for t in REAL]

# ---- pairs


def pair_row(result, mode, after=lambda x: x, suffix=""):
    """%a goes to the high half, %b to the low one."""
    kind = result.removesuffix("x2")

    def want(a, b):
        return np.stack([after(to_type(kind, x, mode)) for x in (b, a)], axis=-1)

    ptx = f"cvt.{mode}{suffix}.{result}.f32 %d, %a, %b;"
    edges = close_to_numbers("f32", kind)[::19]
    return Row(ptx, result, want, {"a": "f32", "b": "f32"}, {"a": edges, "b": edges})


for result in ("f16x2", "bf16x2"):
    for mode in ("rn", "rz"):
        ROWS.append(pair_row(result, mode))
        ROWS.append(pair_row(result, mode, relu, ".relu"))


def packed(type_):
    """a above b, clamped to the type; bytes stand below the low half of c."""
    width, clamp = WIDTH[type_], limits(type_)
    third = ".b32" if width == 8 else ""

    def want(a, b, c=0):
        a, b = (np.clip(x, *clamp) & (2**width - 1) for x in (a, b))
        return (c << 16) | (a << width) | b

    registers = {"a": "s32", "b": "s32"} | ({"c": "b32"} if third else {})
    operands = ", ".join(f"%{n}" for n in registers)
    edges = [0, 1, -1, 127, 128, 255, 256, -128, -129, 32767, 65536, -32769, 2**31 - 1]
    return Row(f"cvt.pack.sat.{type_}.s32{third} %d, {operands};", "b32", want,
               registers, {"a": edges, "b": edges})  # fmt: skip


ROWS += [packed(t) for t in ("u16", "s16", "u8", "s8")]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_against_the_definition(row):
    row.check()


def test_every_variant_has_a_row():
    assert untested("convert", [row.ptx for row in ROWS]) == []


def test_made_up_modifiers_raise():
    refuses_made_up_modifiers([row.ptx for row in ROWS])


@pytest.mark.parametrize(
    "ptx",
    [
        "cvt.rna.tf32.f32 %r0, %f0;",
        "cvt.rn.satfinite.e4m3x2.f32 %h0, %f0, %f1;",
        "cvt.rn.f16x2.e4m3x2 %r0, %h0;",
        "cvt.rn.satfinite.f16.f32 %h0, %f0;",
        "cvt.rs.f16x2.f32 %r0, %f0, %f1, %r1;",
        "cvt.f16.f32 %h0, %f0;",
        "cvt.f32.s32 %f0, %r0;",
        "cvt.s32.f32 %r0, %f0;",
        "cvt.rn.s32.f32 %r0, %f0;",
        "cvt.rn.f32.f16 %f0, %h0;",
        "cvt.rni.s32.s16 %r0, %h0;",
        "cvt.rni.f32.f16 %f0, %h0;",
        "cvt.rni.f16.f32 %h0, %f0;",
        "cvt.rn.relu.f32.f64 %f0, %e0;",
        "cvt.rn.relu.sat.f16.f32 %h0, %f0;",
        "cvt.rm.relu.f16.f32 %h0, %f0;",
        "cvt.rn.sat.bf16.f32 %h0, %f0;",
        "cvt.rz.f32.s64 %f0, %l0;",
        "cvt.rm.f16x2.f32 %r0, %f0, %f1;",
        "cvt.rn.f16x2.f64 %r0, %e0, %e1;",
        "cvt.pack.u16.s32 %r0, %r1, %r2;",
        "cvt.pack.sat.u8.s32 %r0, %r1, %r2;",
        "cvt.pack.sat.u4.s32.b32 %r0, %r1, %r2, %r3;",
    ],
)
def test_what_is_not_modelled_raises_with_its_line(ptx):
    raises_at_its_line(ptx)

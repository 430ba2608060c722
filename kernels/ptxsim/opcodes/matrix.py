"""Tensor-core instructions: ldmatrix, movmatrix, mma.

A matrix lies in the registers of a warp as the PTX ISA's figures show: with
g = lane / 4 and t = lane % 4, a lane holds elements of rows g, g + 8 and of the columns
that start at t times the elements per register.
"""

import numpy as np

from kvq.kernels.ptxsim.meaning import Meaning, opcode
from kvq.kernels.ptxsim.rounding import narrow, widen

u8, u16, u32, f32, i64 = np.uint8, np.uint16, np.uint32, np.float32, np.int64
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
INTEGER = {"s8": np.int8, "u8": np.uint8}


@opcode("ldmatrix")
def ldmatrix(form):
    """1, 2 or 4 matrices of 8 x 8 halves; lane k gives the address of row k."""
    form.choice("sync")
    form.choice("aligned")
    form.choice("m8n8")
    count = int(form.choice("x1", "x2", "x4")[1])
    transposed = form.flag("trans")
    if not (form.flag("shared") or form.flag("shared::cta")):
        raise form.unsupported("a generic address")
    form.type(("b16",))

    def function(machine, site, address):
        machine.whole_warps(site)
        rows = machine.matrix_rows(site, address, count)  # (warps, count, 8, 8) u16
        if transposed:
            rows = rows.swapaxes(2, 3)
        pairs = np.ascontiguousarray(rows).view(u32).reshape(-1, count, 32)
        words = tuple(machine.from_warps(pairs[:, k]) for k in range(count))
        return words if count > 1 else words[0]

    return Meaning(function, ("b32",) * count, ("address",), on_machine=True)


@opcode("movmatrix")
def movmatrix(form):
    """The transpose of an 8 x 8 matrix of halves that lies in the registers."""
    for name in ("sync", "aligned", "m8n8", "trans"):
        form.choice(name)
    form.type(("b16",))

    def function(machine, site, value):
        machine.whole_warps(site)
        halves = (
            np.ascontiguousarray(machine.by_warp(value)).view(u16).reshape(-1, 8, 8)
        )
        turned = np.ascontiguousarray(halves.swapaxes(1, 2)).view(u32).reshape(-1, 32)
        return machine.from_warps(turned)

    return Meaning(function, ("b32",), ("b32",), on_machine=True)


@opcode("mma")
def mma(form):
    """D = A B + C: A is 16 x k, B k x 8, C and D 16 x 8."""
    if [m for m in form.left if m in ("row", "col")] != ["row", "col"]:
        raise form.unsupported("only .row.col is known")
    for name in ("sync", "aligned", "row", "col"):
        form.choice(name)
    d_type, a_type, b_type = _types(form)
    integers = a_type in INTEGER
    shapes = ("m16n8k16", "m16n8k32") if integers else ("m16n8k8", "m16n8k16")
    k = int(form.choice(*shapes).removeprefix("m16n8k"))
    saturating = integers and form.flag("satfinite")
    per_register = 4 if integers else 2
    n_a = 16 * k // 32 // per_register  # registers of A, then of B, then of C
    n_b = n_a // 2
    form.spread()

    def function(machine, site, *operands):
        machine.whole_warps(site)
        words = [machine.by_warp(x) for x in operands]
        a, b = matrix_a(words[:n_a], k, a_type), matrix_b(words[n_a:][:n_b], k, b_type)
        d = _product(a, b, matrix_c(words[n_a + n_b :], d_type), saturating)
        return tuple(machine.from_warps(x) for x in registers_d(d, d_type))

    accumulators = ("b32",) * 2 if d_type == "f16" else (d_type,) * 4
    sources = ("b32",) * (n_a + n_b) + accumulators
    return Meaning(function, accumulators, sources, on_machine=True)


def _types(form):
    """(type of D and C, of A, of B), where they go together."""
    c = form.type(("f32", "f16", "s32"))
    b = form.type(("f16", "bf16", *INTEGER))
    a = form.type(("f16", "bf16", *INTEGER))
    d = form.type(("f32", "f16", "s32"))
    fits = b in INTEGER and d == "s32" if a in INTEGER else a == b and d != "s32"
    if not fits or c != d or (a == "bf16" and d == "f16"):
        raise form.unsupported(f"the types .{d}.{a}.{b}.{c} together")
    return d, a, b


def _product(a, b, c, saturating):
    """The order of the sums is not the hardware's."""
    d = a @ b + c
    if d.dtype == f32:
        return d
    return np.clip(d, -(2**31), 2**31 - 1) if saturating else d


def _elements(words, type_):
    """(warps, 32) words -> (warps, 32, elements in a word)"""
    if type_ in INTEGER:
        bytes_ = np.ascontiguousarray(words).view(INTEGER[type_])
        return bytes_.reshape(-1, 32, 4).astype(i64)
    halves = np.ascontiguousarray(words).view(u16)
    return widen(halves, type_).reshape(-1, 32, 2)


def matrix_a(words, k, type_):
    """Register r: rows g + 8 (r % 2), the columns of half r // 2."""
    per = 4 if type_ in INTEGER else 2
    a = np.zeros((len(words[0]), 16, k), i64 if per == 4 else f32)
    for r, word in enumerate(words):
        x = _elements(word, type_)
        for e in range(per):
            a[:, G + 8 * (r % 2), per * T + e + 4 * per * (r // 2)] = x[:, :, e]
    return a


def matrix_b(words, k, type_):
    """Register r: column g, the rows of half r."""
    per = 4 if type_ in INTEGER else 2
    b = np.zeros((len(words[0]), k, 8), i64 if per == 4 else f32)
    for r, word in enumerate(words):
        x = _elements(word, type_)
        for e in range(per):
            b[:, per * T + e + 4 * per * r, G] = x[:, :, e]
    return b


def matrix_c(words, type_):
    """Register r: rows g + 8 (r // 2), column 2 t + r % 2; of f16 two columns."""
    dtype = i64 if type_ == "s32" else f32
    c = np.zeros((len(words[0]), 16, 8), dtype)
    if type_ == "f16":
        for r, word in enumerate(words):
            x = _elements(word, "f16")
            for e in range(2):
                c[:, G + 8 * r, 2 * T + e] = x[:, :, e]
        return c
    for r, word in enumerate(words):
        c[:, G + 8 * (r // 2), 2 * T + r % 2] = word
    return c


def registers_d(d, type_):
    """The inverse of `matrix_c`."""
    if type_ == "f16":
        for r in range(2):
            rows = d[:, G + 8 * r]
            pair = np.stack([rows[:, LANE, 2 * T], rows[:, LANE, 2 * T + 1]], axis=-1)
            yield narrow(pair, "f16").view(u32).reshape(-1, 32)
        return
    dtype = f32 if type_ == "f32" else np.int32
    for r in range(4):
        yield d[:, G + 8 * (r // 2), 2 * T + r % 2].astype(dtype)

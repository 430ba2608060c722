"""Rows of tables: PTX lines, the types of their operands, and what must come out.

    Row("add.s32 %d, %a, %b;", "s32", lambda a, b: a + b)

The registers %a, %b, %c are filled with edge values of their types, all pairs of them,
and with random numbers. The function gets what they hold: exact Python integers for
integer and bit types, float32 or float64 arrays for f32 and f64, float64 arrays for f16
and bf16, (n, 2) for pairs, bool arrays for predicates. What it returns must be in %d:
integers modulo 2^width; floats to the last bit, where any NaN equals any other.

`untested` says which variants the machine accepts that no row uses.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from exact import FORMATS, bits_of, values_of
from snippets import HEADER, run_snippet

from kvq.kernels import ptxsim
from kvq.kernels.ptxsim.blocks import is_control
from kvq.kernels.ptxsim.meaning import OPCODES, Form, meaning_of
from kvq.kernels.ptxsim.parse import Instruction
from kvq.kernels.ptxsim.types import NUMPY

UNSIGNED, SIGNED = ("u16", "u32", "u64"), ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
BITS = ("b16", "b32", "b64")
FLOATS = ("f32", "f64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Row:
    ptx: str
    out: object  # the type of %d, or {register: type}
    want: object  # function of the sources -> %d, or {register: values}
    sources: dict = field(default_factory=dict)  # {register: type}; default: like %d
    edges: dict = field(default_factory=dict)  # {register: values} to try instead
    close: tuple = None  # (relative, absolute) error that is allowed

    def __str__(self):
        first, _, others = self.ptx.partition(";")
        return first + (" ..." if others else "")

    def check(self):
        outs = self.out if isinstance(self.out, dict) else {"d": self.out}
        names = [n for n in "abc" if f"%{n}" in self.ptx]
        sources = self.sources or dict.fromkeys(names, self.out)
        inputs = arguments(sources, self.edges)
        dtypes = {name: NUMPY[type_] for name, type_ in outs.items()}
        got = run_snippet(self.ptx, dtypes, **inputs)
        with np.errstate(all="ignore"):
            want = self.want(*(held(inputs[n], t) for n, t in sources.items()))
        want = want if isinstance(want, dict) else {"d": want}
        for name, type_ in outs.items():
            compare(self, name, inputs, got[name], want[name], type_)


def compare(row, name, inputs, got, want, type_):
    """Fail with the first element that differs."""
    if type_ in FORMATS or type_ in HALVES:
        got, want = held(got, type_), np.broadcast_to(want, held(got, type_).shape)
        same = _same_floats(got, want, row.close)
        same = same.reshape(len(got), -1).all(axis=1)
    else:
        want = integers(want, type_) if type_ != "pred" else np.asarray(want)
        same = np.broadcast_to(got == want, got.shape)
    if not same.all():
        k = int(np.argmin(same))
        given = ", ".join(f"{n}={held(x, _like(x))[k]!r}" for n, x in inputs.items())
        wanted = np.broadcast_to(want, got.shape)[k]
        count = f"{np.count_nonzero(~same)} of {len(same)} differ"
        pytest.fail(
            f"{row.ptx}  {name}: {given}: got {got[k]!r}, not {wanted!r} ({count})"
        )


def _like(x):
    return {"f": f"f{8 * x.itemsize}"}.get(x.dtype.kind, "pred")


def _same_floats(got, want, close):
    with np.errstate(all="ignore"):  # infinities, signalling NaNs
        nan = np.isnan(got) & np.isnan(want)
        equal = got == want
        if close is None:
            return nan | (equal & (np.signbit(got) == np.signbit(want)))
        relative, absolute = close
        near = np.abs(got - want) <= relative * np.abs(want) + absolute
        return nan | equal | near


# ---- values


def held(array, type_):
    """What the register of a type holds, as the functions of the rows get it."""
    if type_ in HALVES:
        return values_of(array, type_)
    return array.astype(object) if array.dtype.kind in "iu" else array


def integers(values, type_):
    """Integers of any size modulo 2^width, as an array of the type."""
    dtype = np.dtype(NUMPY[type_])
    mask = 2 ** (8 * dtype.itemsize) - 1
    bits = [int(v) & mask for v in np.atleast_1d(np.asarray(values, object))]
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


def arguments(sources, edges):
    """{register: array}: the edge values meet, then random numbers follow."""
    rng = np.random.default_rng(len(sources))
    lists = [
        np.asarray(edges[n], NUMPY[t]) if n in edges else edge_values(t)
        for n, t in sources.items()
    ]
    if len(lists) < 3:
        picks = [
            p.reshape(-1) for p in np.meshgrid(*(np.arange(len(x)) for x in lists))
        ]
    else:
        picks = [rng.integers(0, len(x), 400) for x in lists]
    result = {}
    for (name, type_), values, pick in zip(sources.items(), lists, picks, strict=True):
        more = (
            values[rng.integers(0, len(values), 100)]
            if name in edges
            else random_values(type_, rng, 100)
        )
        both = np.concatenate([values[pick], more])
        result[name] = np.resize(both, -(-len(both) // 128) * 128)
    return result


@cache
def edge_values(type_):
    if type_ == "pred":
        return np.array([False, True])
    if type_ in ("f16x2", "bf16x2"):
        half = edge_values(type_.removesuffix("x2")).astype(np.uint32)
        return half | (np.roll(half, 5) << 16)
    if type_ in FORMATS:
        return _edge_floats(type_)
    width = 8 * np.dtype(NUMPY[type_]).itemsize
    top, alternate = 2 ** (width - 1), 0x5555555555555555
    numbers = [0, 1, 2, 3, 10, -1, -2, -7, top, top - 1, top + 1, alternate, ~alternate]
    return integers(numbers, type_)


def _edge_floats(type_):
    """Both signs of zero, subnormal, normal and large numbers, ties, infinity, NaN."""
    bits, lowest, highest = FORMATS[type_]
    ulp = 2.0 ** (1 - bits)
    size = [0.0, 0.5, 1 - ulp / 2, 1.0, 1 + ulp, 1.5, 2.5, 3.0, 100.0, np.inf]
    size += [2.0**lowest * x for x in (ulp, 1 - ulp, 1.0, 1 + ulp)]
    size += [2.0**highest, 2.0**highest * (2 - ulp)]
    values = np.array([*size, *(-x for x in size), np.nan])
    return values.astype(NUMPY[type_]) if type_ in FLOATS else bits_of(values, type_)


def random_values(type_, rng, count):
    """Integers of all sizes; floats: half of them any bits, half of them moderate."""
    dtype = np.dtype(NUMPY[type_])
    if type_ == "pred":
        return rng.integers(0, 2, count).astype(bool)
    bits = np.frombuffer(rng.bytes(count * dtype.itemsize), f"u{dtype.itemsize}")
    if type_ in FLOATS:
        moderate = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
        return np.where(np.arange(count) % 2, moderate.astype(dtype), bits.view(dtype))
    if type_ in HALVES:
        return bits.astype(dtype)
    shift = rng.integers(0, 8 * dtype.itemsize, count)
    return np.right_shift(bits.view(dtype), shift.astype(dtype))


# ---- which variants the rows use


class Witness(Form):
    """A form that notes what an opcode asked for and what it found.

    `asked` holds (types so far, names offered, the name found or None).
    """

    def __init__(self, instruction):
        super().__init__(instruction)
        self.types, self.asked = (), []

    def _note(self, names, found):
        self.asked.append((self.types, names, found))

    def flag(self, name):
        found = super().flag(name)
        self._note((name,), name if found else None)
        return found

    def choice(self, *names, default=None):
        before = len(self.asked)
        found = super().choice(*names, default=default)
        del self.asked[before:]
        self._note(names, found)
        return found

    def exact_or(self, *approximations):
        super().exact_or(*approximations)
        for name in approximations:
            self._note((name,), name if name in self.left else None)

    def type(self, allowed):
        found = super().type(allowed)
        self._note(tuple(allowed), found)
        self.types += (found,)
        return found

    @property
    def used(self):
        """What was found, each with the opcode and the types that came before."""
        return {key(self.opcode, t, found) for t, _, found in self.asked if found}


def key(opcode, types, name):
    """How a variant is told from others; `.shared::cta` is not told by type."""
    return (opcode, () if "::" in name else types, name)


SPACES = ("global", "shared", "local", "const", "param", "shared::cta")


def instructions(ptx):
    """The instructions of some lines; registers need no declaration here."""
    program = ptxsim.Module(f"{HEADER}.entry k() {{\n{ptx}\n}}").program
    items = program.kernels["k"].items
    return [x for x in items if isinstance(x, Instruction) and not is_control(x)]


def untested(module, texts):
    """The variants of a module's opcodes that are accepted but in none of the lines:
    each as the first instruction that was found to use it.

    Tried is every instruction of the lines with one modifier put in, or replaced by
    another that its opcode looks for.
    """
    mine = {n for n, f in OPCODES.items() if f.__module__.rpartition(".")[2] == module}
    own = [i for t in texts for i in instructions(t) if i.opcode in mine]
    own = list({(i.opcode, i.modifiers): i for i in own}.values())
    used = set().union(*(witness(i).used for i in own))
    left = [f"{name}: no row" for name in sorted(mine - {i.opcode for i in own})]
    for changed in (v for i in own for v in variants(i, used)):
        if accepted(changed) and (new := witness(changed).used - used):
            used |= new
            left.append(".".join([changed.opcode, *changed.modifiers]))
    return left


def witness(instruction):
    form = Witness(instruction)
    OPCODES[instruction.opcode](form)
    return form


def variants(instruction, used):
    """The instruction with one modifier more or another one, not among the used."""
    modifiers, opcode = instruction.modifiers, instruction.opcode
    asked = witness(instruction).asked
    asked += [(t, SPACES, space) for t, _, space in asked if space in SPACES]
    for types, names, found in asked:
        for name in names:
            if key(opcode, types, name) in used:
                continue
            if found not in modifiers:
                yield _with(instruction, (name, *modifiers))
            for k, old in enumerate(modifiers):
                if old == found:
                    yield _with(
                        instruction, (*modifiers[:k], name, *modifiers[k + 1 :])
                    )


def _with(instruction, modifiers):
    text = ".".join([instruction.opcode, *modifiers])
    return replace(instruction, modifiers=modifiers, text=text)


def accepted(instruction):
    try:
        meaning_of(instruction)
    except ptxsim.UnsupportedPTX:
        return False
    return True


def refuses_made_up_modifiers(texts):
    """Every instruction, with a modifier that does not exist, raises with its line."""
    for instruction in (i for t in texts for i in instructions(t)):
        for modifiers in (
            ("strange", *instruction.modifiers),
            (*instruction.modifiers, "strange"),
        ):
            with pytest.raises(ptxsim.UnsupportedPTX, match=r"^line \d+: "):
                meaning_of(_with(instruction, modifiers))


# What a line with the wrong operands would raise, whatever its modifiers say.
OPERANDS = "sources are wanted|more than . results|read as|the result|does not take"


def raises_at_its_line(ptx):
    """Translation of the line, which is line 7 of the text, raises: for what the
    instruction says, not for its operands."""
    registers = ".reg .b16 %h<4>; .reg .b32 %r<9>; .reg .b64 %l<4>;"
    registers += ".reg .f32 %f<4>; .reg .f64 %e<4>; .reg .pred %p<3>;"
    text = f"{HEADER}.entry k() {{\n{registers}\n\n{ptx}\nret; }}\n"
    opcode = re.match(r"\w+", ptx)[0]
    with pytest.raises(ptxsim.UnsupportedPTX, match=rf"^line 7: {opcode}") as raised:
        ptxsim.Module(text).kernel()
    assert not re.search(OPERANDS, str(raised.value))

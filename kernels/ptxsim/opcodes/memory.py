"""mov, ld, st, atom, red, cp.async, cvta, isspacep, and what only orders memory."""

import operator

import numpy as np

from kvq.kernels.ptxsim import memory
from kvq.kernels.ptxsim.meaning import Meaning, opcode
from kvq.kernels.ptxsim.parse import Address, Sink, Symbol
from kvq.kernels.ptxsim.rounding import on_halves
from kvq.kernels.ptxsim.types import (
    BITS,
    FLOATS,
    HALVES,
    INTEGERS,
    NUMPY,
    SIZE,
    bits_of,
)

SPACES = ("global", "shared", "local", "const", "param")
ACCESSED = ("b8", "u8", "s8", *BITS, *INTEGERS, *FLOATS)
WIDEST = 16  # bytes of a vector access


# ---- mov


@opcode("mov")
def mov(form):
    """A copy; or a vector packed into, or unpacked from, one register."""
    type_ = form.type(("pred", *BITS, *INTEGERS, *FLOATS))
    into = len(form.destinations)
    parts = form.spread()[0]
    if into > 1:
        part = f"b{8 * SIZE[type_] // into}"
        return Meaning(_unpack(type_, part, into), (part,) * into, (type_,))
    if parts > 1:
        part = f"b{8 * SIZE[type_] // parts}"
        return Meaning(_pack(type_, part), (type_,), (part,) * parts)
    return Meaning(lambda x: x, (type_,), (type_,))


def _unpack(type_, part, count):
    whole, dtype, width = bits_of(type_), bits_of(part), 8 * SIZE[part]

    def function(x):
        x = x.view(whole)
        shifted = (x >> whole(width * k) if k else x for k in range(count))
        return tuple(y.astype(dtype) for y in shifted)

    return function


def _pack(type_, part):
    whole, width = bits_of(type_), 8 * SIZE[part]

    def function(first, *others):
        result = first.astype(whole)
        for k, x in enumerate(others, start=1):
            result = result | (x.astype(whole) << whole(width * k))
        return result.view(NUMPY[type_])

    return function


# ---- loads and stores


def _space(form, *allowed):
    """The state space, None for a generic address."""
    for name in list(form.left):
        space, _, where = name.partition("::")
        if space in allowed and where in ("", "cta", "entry", "func"):
            form.flag(name)
            return space
    return None


def _accessed(form):
    """(type, number of neighbouring elements) of a load or a store."""
    type_ = form.type(ACCESSED)
    count = next((n for n in (2, 4) if form.flag(f"v{n}")), 1)
    if count * SIZE[type_] > WIDEST:
        raise form.unsupported(f"an access of more than {WIDEST} bytes")
    return type_, count


def _drop_policy(form):
    """`.L2::cache_hint` brings an operand of its own, the last one."""
    if "L2::cache_hint" in form.left and form.sources:
        form.sources.pop()


@opcode("ld")
def ld(form):
    _drop_policy(form)
    type_, count = _accessed(form)
    space = _space(form, *SPACES)
    results = (type_,) * count
    if space == "param":
        return _parameter(form, type_, results)
    dtype = NUMPY[type_]

    def function(machine, site, address):
        return machine.load(site, space, address, dtype, count)

    if count > 1:
        return Meaning(function, results, ("address",), on_machine=True)
    one = lambda *x: function(*x)[0]  # noqa: E731
    return Meaning(one, results, ("address",), on_machine=True)


def _parameter(form, type_, results):
    """Parameters are the same for all lanes: scalars."""
    address = form.sources.pop()
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise form.unsupported("a parameter read through a register")
    name, offset = address.base.name, address.base.offset + address.offset

    def function(machine, site):
        values = machine.parameter(name, offset, NUMPY[type_], len(results))
        return tuple(values) if len(results) > 1 else values[0]

    return Meaning(function, results, (), on_machine=True)


@opcode("st")
def st(form):
    _drop_policy(form)
    type_, count = _accessed(form)
    space = _space(form, "global", "shared", "local")
    form.spread()
    dtype = NUMPY[type_]

    def function(machine, site, address, *values):
        machine.store(site, space, address, values, dtype)

    return Meaning(function, (), ("address",) + (type_,) * count, on_machine=True)


# ---- atomics


def _increment(old, limit):
    return old.dtype.type(0) if old >= limit else old + old.dtype.type(1)


def _decrement(old, limit):
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


def _swap_if_equal(old, wanted, new):
    return new if old == wanted else old


WORDS = ("u32", "s32", "u64", "s64")
# name -> (function of the old value and the operands, types)
ATOMICS = {
    "add": (operator.add, ("u32", "s32", "u64", *FLOATS, *HALVES)),
    "min": (np.minimum, WORDS),
    "max": (np.maximum, WORDS),
    "and": (operator.and_, ("b32", "b64")),
    "or": (operator.or_, ("b32", "b64")),
    "xor": (operator.xor, ("b32", "b64")),
    "inc": (_increment, ("u32",)),
    "dec": (_decrement, ("u32",)),
    "exch": (lambda old, new: new, ("b32", "b64")),
    "cas": (_swap_if_equal, ("b16", "b32", "b64")),
}
WITH_RESULT = ("exch", "cas")  # `red` has no use for them
AT_ONCE = {"add": np.add, "min": np.minimum, "max": np.maximum}
AT_ONCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("atom", "red")
def atom(form):
    """Lanes take turns in the order of their numbers."""
    _drop_policy(form)
    known = [n for n in ATOMICS if form.opcode == "atom" or n not in WITH_RESULT]
    name = form.choice(*known)
    step, types = ATOMICS[name]
    type_ = form.type(types)
    space = _space(form, "global", "shared")
    wants_old = form.opcode == "atom" and not isinstance(form.destinations[0], Sink)
    at_once = AT_ONCE.get(name)
    if type_ in HALVES and name == "add":
        step, at_once = on_halves(operator.add, type_), None

    def function(machine, site, address, *values):
        return machine.atomic(
            site, space, address, values, NUMPY[type_], step, at_once, wants_old
        )

    results = (type_,) if form.opcode == "atom" else ()
    sources = ("address",) + (type_,) * (2 if name == "cas" else 1)
    return Meaning(function, results, sources, on_machine=True)


# ---- asynchronous copies


@opcode("cp")
def cp(form):
    """cp.async: data are read at once and land in shared memory at the wait."""
    form.choice("async")
    if form.flag("commit_group"):
        return Meaning(lambda m, site: m.copies.commit(m), (), (), on_machine=True)
    if form.flag("wait_all"):
        return Meaning(lambda m, site: m.copies.wait(m, None), (), (), on_machine=True)
    if form.flag("wait_group"):
        keep = form.immediate(0)
        return Meaning(lambda m, site: m.copies.wait(m, keep), (), (), on_machine=True)
    return _copy(form)


def _copy(form):
    _drop_policy(form)
    for space in ("shared", "global"):
        if _space(form, space) is None:
            raise form.unsupported(f"a copy that does not name .{space}")
    size = form.immediate(2)
    if size not in (4, 8, 16):
        raise form.unsupported(f"a copy of {size} bytes, where 4, 8, 16 are known")
    partial = len(form.sources) == 3

    def function(machine, site, to, source, valid=None):
        machine.copies.start(machine, site, to, source, size, valid)

    sources = ("address", "address") + ("u32",) * partial
    return Meaning(function, (), sources, on_machine=True)


# ---- addresses


@opcode("cvta")
def cvta(form):
    """To and from generic addresses, where shared and local memory are windows."""
    to = form.flag("to")
    space = _space(form, "global", "shared", "local", "const", "param")
    type_ = form.type(("u64",))
    if space is None:
        raise form.unsupported("a state space is wanted")
    base = np.uint64(memory.WINDOWS.get(space, 0))
    function = (lambda x: x - base) if to else (lambda x: x + base)
    return Meaning(function, (type_,), (type_,))


@opcode("isspacep")
def isspacep(form):
    space = _space(form, "global", "shared", "local")
    if space is None:
        raise form.unsupported("one of global, shared, local is wanted")

    def function(address):
        return memory.space_of(address.astype(np.int64)) == memory.NUMBER[space]

    return Meaning(function, ("pred",), ("u64",))


# ---- order


@opcode("membar", "fence")
def fence(form):
    """Nothing to do: all lanes see one order of memory."""
    return Meaning(lambda: None, (), ())


@opcode("prefetch")
def prefetch(form):
    _space(form, "global", "local")
    form.sources.clear()
    return Meaning(lambda: None, (), ())


@opcode("trap")
def trap(form):
    return Meaning(lambda m, site: m.fault(site, "trap"), (), (), on_machine=True)

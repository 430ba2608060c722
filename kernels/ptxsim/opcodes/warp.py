"""The lanes of a warp exchange values: shfl, vote, match, redux, activemask."""

import numpy as np

from kvq.kernels.ptxsim.meaning import Meaning, opcode

u32, i64 = np.uint32, np.int64
REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@opcode("shfl")
def shfl(form):
    """A value of another lane: d|p = the value, and was that lane in range?"""
    form.choice("sync")
    mode = form.choice("idx", "up", "down", "bfly")
    form.type(("b32",))
    want_p = len(form.destinations) > 1

    def function(machine, site, value, b, c, mask):
        machine.members(site, mask)
        lane, in_range = source_lane(mode, machine.special("%laneid"), b, c)
        result = machine.from_lane(site, value, lane)
        return (result, in_range) if want_p else result

    results = ("b32", "pred") if want_p else ("b32",)
    return Meaning(function, results, ("b32", "u32", "u32", "u32"), on_machine=True)


def source_lane(mode, lane, b, c):
    """(lane to read, was it in range?), PTX ISA 9.7.9.6.

    c holds the last lane of a segment (bits 0-4) and which bits of the lane number name
    the segment (bits 8-12).
    """
    lane, b, last = (x.astype(i64) for x in (lane, b & u32(31), c & u32(31)))
    segment = ((c >> u32(8)) & u32(31)).astype(i64)
    first = lane & segment
    last = first | (last & ~segment)
    other = {
        "up": lane - b,
        "down": lane + b,
        "bfly": lane ^ b,
        "idx": first | (b & ~segment & 31),
    }[mode]
    in_range = other >= last if mode == "up" else other <= last
    return np.where(in_range, other, lane), in_range


@opcode("vote")
def vote(form):
    form.choice("sync")
    mode = form.choice("all", "any", "uni", "ballot")
    result = form.type(("pred", "b32"))
    if (mode == "ballot") != (result == "b32"):
        raise form.unsupported(f".{mode} with .{result}")

    def function(machine, site, p, mask):
        machine.members(site, mask)
        yes = machine.ballot(p) & mask
        if mode == "ballot":
            return yes
        return {"any": yes != 0, "all": yes == mask, "uni": (yes == 0) | (yes == mask)}[
            mode
        ]

    return Meaning(function, (result,), ("pred", "u32"), on_machine=True)


@opcode("activemask")
def activemask(form):
    form.type(("b32",))
    function = lambda m, site: m.ballot(np.bool_(True))  # noqa: E731
    return Meaning(function, ("b32",), (), on_machine=True)


def _members_matrix(mask):
    """(lanes, 32): is lane k of the warp in the mask of the lane?"""
    return (mask[:, None] >> np.arange(32, dtype=u32)) & u32(1) != 0


@opcode("match")
def match(form):
    """The lanes that hold the same value (any); or all, and do they? (all)"""
    mode = form.choice("any", "all")
    form.choice("sync")
    type_ = form.type(("b32", "b64"))
    want_p = mode == "all" and len(form.destinations) > 1

    def function(machine, site, value, mask):
        machine.members(site, mask)
        value, mask = machine.per_lane(value), machine.per_lane(mask)
        equal = machine.warp_rows(value) == value[:, None]
        bits = _bits(equal & _members_matrix(mask))
        if mode == "any":
            return bits
        result = np.where(bits == mask, mask, u32(0))
        return (result, bits == mask) if want_p else result

    results = ("b32", "pred") if want_p else ("b32",)
    return Meaning(function, results, (type_, "u32"), on_machine=True)


def _bits(rows):
    """(n, 32) bool -> n masks"""
    return (rows.astype(u32) << np.arange(32, dtype=u32)).sum(axis=1, dtype=u32)


@opcode("redux")
def redux(form):
    """One number from the values of all lanes in the mask."""
    form.choice("sync")
    name = form.choice(*REDUCE)
    bitwise = name in ("and", "or", "xor")
    type_ = form.type(("b32",) if bitwise else ("u32", "s32"))

    def function(machine, site, value, mask):
        machine.members(site, mask)
        value, mask = machine.per_lane(value), machine.per_lane(mask)
        rows, member = machine.warp_rows(value), _members_matrix(mask)
        neutral = _neutral(name, value.dtype)
        return REDUCE[name].reduce(
            np.where(member, rows, neutral), axis=1, dtype=value.dtype
        )

    return Meaning(function, (type_,), (type_, "u32"), on_machine=True)


def _neutral(name, dtype):
    limits = np.iinfo(dtype)
    value = {"min": limits.max, "max": limits.min, "and": limits.max}.get(name, 0)
    return dtype.type(value)


@opcode("bar")
def bar_warp_sync(form):
    """bar.warp.sync: lanes of a warp run in step here, so it only checks the mask."""
    form.choice("warp")
    form.choice("sync")
    function = lambda machine, site, mask: machine.members(site, mask)  # noqa: E731
    return Meaning(function, (), ("u32",), on_machine=True)

"""`decode` on the host: q and a cache -> flat arrays -> attention, float32.

out = softmax(scale * q K^T) V, one query token of each sequence

`VERSIONS` compute in float32, in both languages. `TENSOR_CORES` are CUDA C alone, read
pages, and multiply binary16 numbers: see `tensor_cores.py`.
"""

import math
from types import SimpleNamespace

import numpy as np

from kvq.dtypes import as_float_array
from kvq.kernels.decode import tensor_cores, tile
from kvq.kernels.decode.gather import PreparedCache, gather
from kvq.kernels.decode.paged import Paged
from kvq.kernels.host import (
    C_TYPES,
    Version,
    first_invalid,
    flat,
    narrow,
    shaped,
    unwritten,
    version_of,
    versions,
)
from kvq.kernels.launch import Launch
from kvq.scheme import UNIFORM

VERSIONS = versions(
    Version("v1", "decode/v1_two_pass"),
    Version("v2", "decode/v2_online_softmax", "paired", shuffles=True),
    Version("v3", "decode/v3_split_kv", "paired", shuffles=True),
)
TENSOR_CORES = tensor_cores.VERSIONS
ALL = {**VERSIONS, **TENSOR_CORES}
# Whatever the rounding that made the codes; scales of any type are read exactly.
ANY = {
    "levels": UNIFORM,
    "per": ("token", "channel", "head"),
    "transform": (None,),
}
PAIRED = {**ANY, "bits": (2, 3, 4, 8)}
LIMITS = {
    "canonical": {"key": ANY, "value": ANY},
    "paired": {
        "key": {**PAIRED, "per": ("token", "channel")},
        "value": {**PAIRED, "per": ("token",)},
    },
}
HEAD_DIMS = tile.HEAD_DIMS  # of v2 and v3
WARPS = 4  # of a block, but for v2 and v3 that need much shared memory: `tile.warps`
TILE = tile.TILE  # tokens that a warp takes at a time
BLOCKS = 528  # v3: blocks to keep a large GPU busy (4 for each of 132 processors)


def unsupported(policy, version, D=None):
    """None, or why `version` cannot read a cache of this policy and head dimension.

    D=None : of any dimension.
    """
    layout = version_of(ALL, version).layout
    if version in TENSOR_CORES:
        return tensor_cores.unsupported(policy, version, D)
    if policy.value is None:
        return "value=None (a latent cache); valid: a Scheme"
    exact = [scheme.full_precision for scheme in policy.schemes]
    if any(exact) and not all(exact):
        return "keys or values alone in full precision; valid: both or neither"
    for side, limits in LIMITS[layout].items():
        reason = not any(exact) and first_invalid(getattr(policy, side), limits)
        if reason:
            return f"{side}: {reason}"
    if layout == "paired" and D not in (None, *HEAD_DIMS):
        return f"D={D}; valid: {', '.join(map(str, HEAD_DIMS))}"
    return tile.unsupported(policy) if layout == "paired" else None


def prepare(cache, version="v1"):
    """A cache gathered once for many calls: see `PreparedCache`, and `paged.Paged`."""
    version = version_of(ALL, version)
    if version.name in TENSOR_CORES:
        return tensor_cores.prepare(cache, version)
    return gather(cache, version)


def launches(q, cache, version="v1", *, scale=None, softcap=None, sink_logits=None):
    """What `cache.attend(q, ...)` does, as kernels.

    q : (B, H_q, 1, D), or (H_q, 1, D) for a single sequence.
    cache : a KVCache, or what `prepare` gave for a version with the same layout.
    Returns (launches, collect): once the launches have run, collect() is float32 of
    the shape of q. Raises TypeError or ValueError.
    """
    version, q = version_of(ALL, version), as_float_array(q, "q")
    if not isinstance(cache, (PreparedCache, Paged)):
        cache = prepare(cache, version.name)
    if cache.version.layout != version.layout:
        raise ValueError(
            f"the cache was prepared for {cache.version.name}, in the "
            f"{cache.version.layout} layout; {version.name} reads {version.layout}"
        )
    H_q = _check_query(q, cache)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    numbers = scale, _checked_softcap(softcap)
    sinks = _checked_sinks(sink_logits, H_q)
    out = unwritten(q.shape, np.float32)
    if version.name in TENSOR_CORES:
        todo = tensor_cores.launches(version, cache, q, sinks, out, numbers)
        return todo, lambda: shaped(out, q.shape)
    build = {"v1": _v1, "v2": _v2, "v3": _v3}[version.name]
    todo = build(version, cache, H_q, _inputs(q, cache), sinks, out, numbers)
    return todo, lambda: shaped(out, q.shape)


def _check_query(q, cache):
    """H_q. Raises ValueError for queries that do not fit the cache."""
    B, H_kv, _, _, D = cache.shape
    if q.ndim not in (3, 4) or (1 if q.ndim == 3 else len(q)) != B:
        raise ValueError(f"q {q.shape}; expected (B, H_q, 1, D) with B = {B} sequences")
    H_q, T_q, width = q.shape[-3:]
    if T_q != 1:
        raise ValueError(f"q {q.shape}: T_q={T_q}; valid: 1, the newest token")
    if H_q < 1 or H_q % H_kv or width != D:
        raise ValueError(
            f"q {q.shape}; expected H_q a multiple of {H_kv} (KV heads) and D = {D}"
        )
    return H_q


def _checked_softcap(softcap):
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r}; valid: a number > 0 or None")
    return float(softcap or 0)


def _checked_sinks(sink_logits, H_q):
    """(flat array, how many): (a zero, 0) where there are none."""
    if sink_logits is None:
        return flat(None, np.float32), False
    sinks = np.asarray(sink_logits, np.float32)
    if sinks.shape != (H_q,):
        raise ValueError(
            f"sink_logits {sinks.shape}; expected one per query head, ({H_q},)"
        )
    return flat(sinks), True


# --- the arrays and the constants -----------------------------------------------------
def _inputs(q, cache):
    """q; codes, scale, zero of keys and of values; exact keys, values; lengths."""
    k, v = cache.k, cache.v
    X = narrow(q.dtype.name, k.exact.dtype.name, v.exact.dtype.name)
    S = narrow(k.scale.dtype.name, v.scale.dtype.name)
    coded = [
        array
        for side in (k, v)
        for array in (flat(side.codes), flat(side.scale, S), flat(side.zero, S))
    ]
    return (
        flat(q, X),
        *coded,
        flat(k.exact, X),
        flat(v.exact, X),
        flat(cache.lengths),
    )


def _types(inputs):
    return {"X": C_TYPES[inputs[0].dtype.name], "S": C_TYPES[inputs[2].dtype.name]}


def _constants(cache, inputs, **more):
    """What v2 and v3 are compiled for."""
    D, per_channel = cache.shape[-1], cache.k.scheme.per == "channel"
    constants = {
        **_types(inputs),
        **more,
        "HEAD_DIM": D,
        "KEY_BITS": cache.k.scheme.bits,
        "KEY_GROUP": cache.k.group[0] if per_channel else min(cache.k.group[1], D),
        "KEY_PER_CHANNEL": int(per_channel),
        "KEY_ASYMMETRIC": int(cache.k.scheme.has_zero),
        "VALUE_BITS": cache.v.scheme.bits,
        "VALUE_GROUP": min(cache.v.group[1], D),
        "VALUE_ASYMMETRIC": int(cache.v.scheme.has_zero),
    }
    return {**constants, "WARPS": tile.warps(SimpleNamespace(**constants))}


# --- the versions ---------------------------------------------------------------------
def _v1(version, cache, H_q, inputs, sinks, out, numbers):
    """One block per query head; its scores are kept in global memory."""
    B, H_kv, T_cap, R_cap, D = cache.shape
    scores = unwritten((B * H_q, T_cap + R_cap), np.float32)
    settings = [
        number
        for side in (cache.k, cache.v)
        for number in (side.scheme.bits, *side.group, side.scheme.has_zero)
    ]
    sink_logits, has_sink = sinks
    args = (
        *inputs,
        sink_logits,
        scores,
        out,
        *(B, H_q, H_kv, T_cap, R_cap, D),
        *settings,
        has_sink,
        *numbers,
    )
    place = len(inputs) + 1  # of the scores
    return [
        Launch(
            version.source,
            "decode_v1",
            _types(inputs),
            grid=B * H_q,
            block=32 * WARPS,
            args=args,
            outputs=(place, place + 1),
        )
    ]


def _v2(version, cache, H_q, inputs, sinks, out, numbers):
    """One block per query head; its warps share out the tokens."""
    B, H_kv, T_cap, R_cap, _ = cache.shape
    sink_logits, has_sink = sinks
    shape, constants = (B, H_q, H_kv, T_cap, R_cap), _constants(cache, inputs)
    return [
        Launch(
            version.source,
            "decode_v2",
            constants,
            grid=B * H_q,
            block=32 * constants["WARPS"],
            args=(*inputs, sink_logits, out, *shape, has_sink, *numbers),
            outputs=(len(inputs) + 1,),
        )
    ]


def _v3(version, cache, H_q, inputs, sinks, out, numbers):
    """One block per split, KV head and up to 8 of its query heads; then a merge."""
    B, H_kv, T_cap, R_cap, D = cache.shape
    ratio = H_q // H_kv
    constants = _constants(cache, inputs, RATIO=ratio)
    chunks, _ = tile.chunks_and_heads(ratio)
    splits, tokens = _split(cache, B * H_kv * chunks)
    part_o = unwritten((splits, B, H_q, D), np.float32)
    part_ml = unwritten((splits, B, H_q, 2), np.float32)
    sink_logits, has_sink = sinks
    shape = B, H_q, H_kv, T_cap, R_cap
    return [
        Launch(
            version.source,
            "decode_v3",
            constants,
            grid=splits * B * H_kv * chunks,
            block=32 * constants["WARPS"],
            args=(*inputs, part_o, part_ml, *shape, *numbers, splits, tokens),
            outputs=(len(inputs), len(inputs) + 1),
        ),
        Launch(
            version.source,
            "decode_v3_merge",
            constants,
            grid=B * H_q,
            block=32 * WARPS,
            args=(part_o, part_ml, sink_logits, out, B, H_q, splits, has_sink),
            outputs=(3,),
        ),
    ]


def _split(cache, blocks):
    """(splits, tokens of each) of the longest sequence, for `blocks` blocks a split.

    Enough splits for BLOCKS blocks, but a tile for each warp of a block. Whole tiles,
    and whole groups of keys per channel.
    """
    longest = max(int(cache.lengths.sum(axis=1).max()), 1)
    unit = math.lcm(TILE, cache.k.group[0])
    wanted = -(-BLOCKS // blocks)
    tokens = max(-(-longest // wanted), TILE * WARPS)
    tokens = -(-tokens // unit) * unit
    return -(-longest // tokens), tokens

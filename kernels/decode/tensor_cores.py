"""`decode` by tensor cores, on the host: q and pages -> flat arrays -> attention.

CUDA C alone: Numba has no word for the instructions `mma` and `movmatrix`. Products are
of binary16 numbers, sums in float32: so the error is that of binary16, not of float32 as
with v1 to v3. They need compute capability 8.0.
"""

import numpy as np

from kvq.kernels import pages
from kvq.kernels.decode import paged
from kvq.kernels.host import C_TYPES, Version, flat, narrow, unwritten, versions
from kvq.kernels.launch import Launch

VERSIONS = versions(
    Version("v4", "decode/v4_tensor_cores", "pages", shuffles=True),
)
WARPS = 4  # of a block
BLOCKS = 528  # to keep a large GPU busy: 4 for each of 132 processors
prepare = paged.prepare


def unsupported(policy, D=None):
    """None, or why no page holds a cache of this policy and head dimension."""
    if policy.value is None:
        return "value=None (a latent cache); valid: a Scheme"
    return pages.unsupported(policy.key, policy.value, D)


def heads_of_block(ratio, D):
    """(blocks that share a KV head, query heads of each): `fragments.cuh`."""
    heads = 16 if ratio > 8 and D <= 128 else 8
    return -(-ratio // heads), heads


def constants(cache, ratio, q_type, softcap):
    """What the kernels are compiled for."""
    key, value, D = cache.layout.key, cache.layout.value, cache.layout.D
    return {
        "HEAD_DIM": D,
        "RATIO": ratio,
        "WARPS": WARPS,
        "KEY_BITS": key.bits,
        "KEY_GROUP": key.group if key.per == "channel" else min(key.group or D, D),
        "KEY_PER_CHANNEL": int(key.per == "channel"),
        "KEY_ASYMMETRIC": int(key.has_zero),
        "VALUE_BITS": value.bits,
        "VALUE_GROUP": min(value.group or D, D),
        "VALUE_ASYMMETRIC": int(value.has_zero),
        "SOFTCAP": int(softcap > 0),
        "X": q_type,
    }


def launches(version, cache, q, sinks, out, numbers):
    """The Launches of one version. q (B, H_q, 1, D); cache : a Paged; sinks : (flat
    array, are there any?); numbers : scale, softcap (0: none)."""
    return {"v4": _v4}[version.name](version, cache, q, sinks, out, numbers)


def _arrays(cache, q):
    X = narrow(q.dtype.name)
    pools = (
        flat(a) if a.size else np.zeros(4, a.dtype)
        for a in (cache.pages, cache.exact_pages)
    )
    return (
        flat(q, X),
        *pools,
        flat(cache.table),
        flat(cache.lengths),
        flat(cache.largest),
    )


def _v4(version, cache, q, sinks, out, numbers):
    """Blocks for splits of the pages, then a merge."""
    B, H_kv, P_cap, E_cap, D = cache.shape
    H_q = q.shape[-3]
    chunks, _ = heads_of_block(H_q // H_kv, D)
    blocks = B * H_kv * chunks
    splits, pages_per_split = _split(cache, blocks)
    compiled = constants(cache, H_q // H_kv, C_TYPES[narrow(q.dtype.name)], numbers[1])
    part_o = unwritten((splits, B, H_q, D), np.float32)
    part_ml = unwritten((splits, B, H_q, 2), np.float32)
    inputs = _arrays(cache, q)
    sink_logits, has_sink = sinks
    return [
        Launch(
            version.source,
            "decode_v4",
            compiled,
            grid=splits * blocks,
            block=32 * WARPS,
            args=(
                *(*inputs, part_o, part_ml),
                *(B, H_q, H_kv, P_cap, E_cap, *numbers, pages_per_split),
            ),
            outputs=(len(inputs), len(inputs) + 1),
        ),
        Launch(
            version.source,
            "decode_v4_merge",
            compiled,
            grid=B * H_q,
            block=32 * WARPS,
            args=(part_o, part_ml, sink_logits, out, B, H_q, splits, has_sink),
            outputs=(3,),
        ),
    ]


def _split(cache, blocks):
    """(splits, pages of each) of the longest sequence, for `blocks` blocks a split."""
    tokens = np.array([cache.layout.tokens, cache.exact.tokens])
    longest = max(int((-(-cache.lengths // tokens)).sum(axis=1).max()), 1)
    each = max(-(-longest // -(-BLOCKS // blocks)), WARPS)
    return -(-longest // each), each

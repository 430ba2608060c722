"""`decode` by tensor cores, on the host: q and pages -> flat arrays -> attention.

CUDA C alone: Numba has no word for the instructions `mma` and `movmatrix`. Products
are of binary16 numbers, sums in float32: so the error is that of binary16, not that of
float32 as with v1 to v3. They need compute capability 8.0.

Queries in bfloat16 become binary16 exactly: times a power of two that brings the
largest of them near 2^14, so that only what is 2^28 times smaller loses bits. Keys and
values in bfloat16 stay what they are. A window of them is multiplied as bfloat16, and
so are p and q there; codes are multiplied as binary16 all the same.

A cache of the policy "fp16" or "bf16" is the baseline: the same kernels, no codes.
"""

import numpy as np

from kvq.kernels import pages
from kvq.kernels.decode import paged
from kvq.kernels.host import C_TYPES, Version, flat, flat_numbers, unwritten, versions
from kvq.kernels.launch import Launch

VERSIONS = versions(
    Version("v4", "decode/v4_tensor_cores", "pages", shuffles=True),
    Version("v5", "decode/v5_async_ring", "pages", shuffles=True),
)
WARPS = 4  # of a block
STAGES = 2  # v5: steps that a warp has in shared memory
MOST_SHARED = 48 * 1024  # bytes of a block, without asking for more
ALL_SHARED = 160 * 1024  # bytes of a processor, at least (compute capability 8.0)
PROCESSORS = 132  # of a large GPU (H100, H200)
prepare = paged.prepare


def unsupported(policy, version, D=None):
    """None, or why `version` cannot read a cache of this policy and head dimension."""
    if policy.value is None:
        return "value=None (a latent cache); valid: a Scheme"
    reason = pages.unsupported(policy.key, policy.value, D)
    if reason or version != "v5" or D is None:
        return reason
    size = STAGES * stage_bytes(pages.PageLayout(policy.key, policy.value, D))
    if size > MOST_SHARED:
        return f"{size} bytes of shared memory for a warp; valid: up to {MOST_SHARED}"
    return None


def stage_bytes(layout):
    """What v5 keeps of a step: the scales of its keys, and the step."""
    return 4 * (sum(layout.head) + sum(layout.step))


def heads_of_block(ratio, D):
    """(blocks that share a KV head, query heads of each): `fragments.cuh`."""
    heads = 16 if ratio > 8 and D <= 128 else 8
    return -(-ratio // heads), heads


def wave(version, layout, ratio):
    """Warps that such a GPU runs at a time: `RESIDENT` in `fragments.cuh`."""
    _, heads = heads_of_block(ratio, layout.D)
    key, value = layout.key, layout.value
    few = (key.per, key.group) == ("channel", pages.STEP) and value.bits != 2
    few = few or key.full_precision
    warps = 8 if heads * layout.D > 1024 else 16 if few else 12
    if version == "v5":
        warps = min(warps, ALL_SHARED // (STAGES * stage_bytes(layout)))
        warps -= warps % warps_of_block(version, layout)
    return PROCESSORS * warps


def warps_of_block(version, layout):
    """v5: as many as have room for their rings."""
    if version == "v4":
        return WARPS
    return min(WARPS, MOST_SHARED // (STAGES * stage_bytes(layout)))


def constants(version, layout, ratio, q_type="__half", softcap=0, exact="__half"):
    """What the kernels are compiled for. layout : a PageLayout. exact : the type of
    numbers in full precision."""
    found = {
        **layout.constants,
        "RATIO": ratio,
        "WARPS": warps_of_block(version, layout),
        "SOFTCAP": int(softcap > 0),
        "X": q_type,
        "E": exact,
    }
    return found | {"STAGES": STAGES} if version == "v5" else found


def launches(version, cache, q, sinks, out, numbers):
    """The Launches of one version. q (B, H_q, 1, D); cache : a Paged; sinks : (flat
    array, are there any?); numbers : scale, softcap (0: none)."""
    build = {"v4": _v4, "v5": _v5}[version.name]
    return build(version, cache, q, sinks, out, numbers)


def _arrays(cache, q):
    pools = (
        flat(a) if a.size else np.zeros(4, a.dtype)
        for a in (cache.pages, cache.exact_pages)
    )
    return (
        flat_numbers(q)[0],
        *pools,
        flat(cache.table),
        flat(cache.lengths),
        flat(cache.largest),
    )


def _compiled(version, cache, q, numbers):
    ratio = q.shape[-3] // cache.shape[1]
    _, q_type = flat_numbers(q)
    exact = C_TYPES[cache.exact.key.levels]
    return constants(version.name, cache.layout, ratio, q_type, numbers[1], exact)


def _v4(version, cache, q, sinks, out, numbers):
    """Blocks for splits of the pages, then a merge."""
    B, H_kv, P_cap, E_cap, D = cache.shape
    H_q = q.shape[-3]
    chunks, _ = heads_of_block(H_q // H_kv, D)
    blocks = B * H_kv * chunks
    wanted = -(-wave(version.name, cache.layout, H_q // H_kv) // (WARPS * blocks))
    splits, pages_per_split = _split(cache, wanted)
    compiled = _compiled(version, cache, q, numbers)
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


def _split(cache, wanted):
    """(splits, pages of each) of the longest sequence; at least a page a warp."""
    tokens = np.array([cache.layout.tokens, cache.exact.tokens])
    longest = max(int((-(-cache.lengths // tokens)).sum(axis=1).max()), 1)
    each = max(-(-longest // wanted), WARPS)
    return -(-longest // each), each


def _v5(version, cache, q, sinks, out, numbers):
    """One launch, one wave: equal pieces of the list of all steps."""
    _, H_kv, P_cap, E_cap, D = cache.shape
    H_q = q.shape[-3]
    chunks, heads = heads_of_block(H_q // H_kv, D)
    compiled = _compiled(version, cache, q, numbers)
    warps = compiled["WARPS"]
    offsets = _offsets(cache, H_kv * chunks)
    rows, steps = len(offsets) - 1, int(offsets[-1])
    each = -(-steps // wave(version.name, cache.layout, H_q // H_kv))
    pieces = -(-steps // each)
    inputs = _arrays(cache, q)
    part_o = unwritten((pieces + rows, heads, D), np.float32)
    part_ml = unwritten((pieces + rows, heads, 2), np.float32)
    arrived, (sink_logits, has_sink) = np.zeros(rows, np.int32), sinks
    return [
        Launch(
            version.source,
            "decode_v5",
            compiled,
            grid=-(-pieces // warps),
            block=32 * warps,
            args=(
                *(*inputs, offsets, part_o, part_ml, arrived, sink_logits, out),
                *(rows, H_q, H_kv, P_cap, E_cap, *numbers, each, has_sink),
            ),
            outputs=tuple(len(inputs) + i for i in (1, 2, 3, 5)),
        )
    ]


def _offsets(cache, rows):
    """Where the steps of each row begin in the list of all: `rows` a sequence."""
    steps = np.maximum(-(-cache.lengths // pages.STEP).sum(axis=1), 1)
    return np.concatenate([[0], np.repeat(steps, rows).cumsum()]).astype(np.int32)

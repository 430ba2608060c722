"""How fast a decode step can be at best, and what limits it.

A decode step reads the whole cache once from memory (a short cache may still lie in
L2 and come faster). Its time is at least what the memory needs
for the bytes, what the tensor cores need for the products, and what the schedulers
need to start the instructions; the largest of the three binds. Real kernels come
near this bound for long contexts only: `crossover_tokens` adds a fixed overhead.

Symbols as in `memory`; `H_q` query heads.
"""

from kvq.hardware import device as find_device
from kvq.memory import (
    bits_per_element,
    bytes_per_token,
    cache_bytes,
    first,
    fits,
    max_batch,
    max_tokens,
    page_bytes,
    peak_bytes,
    shared_bytes,
    stored_policy,
)
from kvq.scheme import policy as find_policy

# Lane instructions per quantized number, for the whole inner loop of a decode kernel:
# loads, products and softmax included. Counted in machine code compiled for sm_90
# (D = 128, scales and zeros per 64 numbers, tensor-core products, up to 8 query heads
# per KV head; never timed). Within 7 % they are the same for 8, 4 and 2 bits: fewer
# bits mean more instructions per byte.
INSTRUCTIONS = {
    "folded": 1.5,  # scales folded into q and weights, offsets cancelled by products
    "exact": 1.9,  # scales folded, offsets removed by one instruction per two numbers
    "per-element": 2.4,  # every number multiplied by its own scale
}


# speedup = 16 / bits, bits = b + 32 / G for G numbers with an fp16 scale and zero
def max_speedup(policy, shape):
    """How much faster than an fp16 cache a decode step over a long one can be.

    The ratio of bytes. A kernel that claims more was compared with an fp16 kernel
    that did not reach the memory's bandwidth.
    """
    return 16 / bits_per_element(policy, shape)


# bytes = cache + q and output, 2 bytes each: B * L * H_q * (D + D_v) * 2
def decode_bytes(policy, shape, tokens, batch=1):
    """Bytes that one decode step reads and writes, over all layers."""
    q_and_out = _q_heads(shape) * (shape.head_dim + shape.value_width) * 2
    cache = cache_bytes(policy, shape, tokens=tokens, batch=batch)
    return cache + batch * shape.layers * q_and_out


# flops = B * sum over layers of 2 * H_q * T * (D + D_v), which is 4 * H_q * T * D
def decode_flops(shape, tokens, batch=1):
    """Multiplications and additions of q K^T and of the weights times V."""
    seen = sum(L * T for L, T in shape.held(tokens))
    return batch * 2 * _q_heads(shape) * seen * (shape.head_dim + shape.value_width)


def _q_heads(shape):
    return shape.q_heads or shape.kv_heads


# instructions = c * (quantized numbers)
def decode_instructions(policy, shape, tokens, batch=1, per_number=None):
    """Lane instructions that one decode step starts for its quantized numbers.

    per_number : c, by default INSTRUCTIONS["exact"]. Full-precision rows count as
        free: nothing is decoded, and fp16 kernels are limited by bandwidth.
    """
    per_number = INSTRUCTIONS["exact"] if per_number is None else per_number
    policy = stored_policy(policy, shape)
    width = sum(
        D
        for scheme, D in zip(policy.schemes, shape.widths, strict=True)
        if not scheme.full_precision
    )
    quantized = sum(L * policy.split(T)[1] for L, T in shape.held(tokens))
    return batch * quantized * shape.kv_heads * width * per_number


# t >= max(bytes / bandwidth, flops / peak, instructions / issue rate)
def decode_time(
    policy, shape, device, tokens, batch=1, *, bandwidth=None, per_number=None
):
    """The least time of one decode step of attention, over all layers.

    device : a Device or its name. bandwidth : bytes/s; None is the datasheet's.
    Returns a dict: bytes, flops, instructions; memory_seconds, compute_seconds and
    issue_seconds, the time that each of them needs; seconds, the largest of those;
    limit, the one that binds: "bandwidth", "tensor cores" or "instructions".
    """
    device = find_device(device)
    nbytes = decode_bytes(policy, shape, tokens, batch)
    flops = decode_flops(shape, tokens, batch)
    instructions = decode_instructions(policy, shape, tokens, batch, per_number)
    seconds = {
        "bandwidth": nbytes / (bandwidth or device.bandwidth),
        "tensor cores": flops / device.fp16_flops,
        "instructions": instructions / device.issue_rate,
    }
    limit = max(seconds, key=seconds.get)
    return {
        "bytes": nbytes,
        "flops": flops,
        "instructions": instructions,
        "memory_seconds": seconds["bandwidth"],
        "compute_seconds": seconds["tensor cores"],
        "issue_seconds": seconds["instructions"],
        "seconds": seconds[limit],
        "limit": limit,
    }


# t(T) = overhead + bytes(T) / bandwidth  <  bytes_fp16(T) / bandwidth
def crossover_tokens(policy, shape, device, overhead, batch=1, *, bandwidth=None):
    """The context length from which a decode step beats one over an fp16 cache.

    overhead : seconds that a step over the quantized cache costs more, at any length
        (a second launch, a merge, reading the scales). Otherwise both steps are taken
        to move their bytes at the same bandwidth.
    Returns the smallest T, or None if there is none.
    """
    if not overhead >= 0:
        raise ValueError(f"overhead={overhead!r}; valid: 0 seconds or more")
    if bits_per_element(policy, shape) >= 16:
        return None
    to_save = overhead * (bandwidth or find_device(device).bandwidth)

    # Saved bytes grow with every block that is quantized and never shrink.
    def saves_enough(T):
        saved = cache_bytes("fp16", shape, tokens=T, batch=batch) - cache_bytes(
            policy, shape, tokens=T, batch=batch
        )
        return saved > to_save

    return first(saves_enough, None if shape.growing_layers else shape.sliding_window)


def plan(
    shape,
    device,
    policies,
    tokens,
    batch=1,
    weight_bytes=None,
    reserve=0,
    *,
    prefix=0,
    page=1,
):
    """What each policy costs and allows on one device: a list of dicts, one a policy.

    device : a Device or its name; None leaves out what depends on one.
    shape : a ModelShape (`shape.shard(n)` for one of n tensor-parallel ranks).
    weight_bytes : None is 2 bytes for each of `shape.weight_params`.
    reserve : bytes kept free for activations and whatever shares the device.
    prefix : tokens that the sequences have in common and store once, in whole pages.
    page : quantized tokens that are allocated together.

    policy : its name.            bits_per_element, bytes_per_token : in the long run.
    page_bytes : of one page of every layer, 0 for page=1.
    cache_bytes : of `batch` sequences of `tokens` tokens.
    total_bytes : with weights and reserve.
    fits : whether they can grow that long within the device's usable memory.
    max_tokens : the longest `batch` sequences that can, None if any length fits.
    max_users : how many sequences of `tokens` tokens can.
    max_speedup : `max_speedup`.
    attention_seconds, limit : `decode_time` of a step of attention, and what binds.
    step_seconds : the same and reading the weights once.

    Raises ValueError where the weights are unknown: a plan without them misleads.
    """
    if device is not None:
        device = find_device(device)
        weight_bytes = _weight_bytes(shape, weight_bytes)
    rows = []
    for policy in map(find_policy, policies):
        twice = (batch - 1) * shared_bytes(policy, shape, tokens, prefix, page)
        nbytes = cache_bytes(policy, shape, tokens=tokens, batch=batch, page=page)
        row = {
            "policy": policy.name or "unnamed",
            "bits_per_element": bits_per_element(policy, shape),
            "bytes_per_token": bytes_per_token(policy, shape),
            "page_bytes": page_bytes(policy, shape, page),
            "cache_bytes": nbytes - twice,
            "max_speedup": max_speedup(policy, shape),
        }
        if device is not None:
            peak = peak_bytes(policy, shape, tokens, batch, page=page) - twice
            step = decode_time(policy, shape, device, tokens, batch)
            budget = max(device.usable - weight_bytes - reserve, 0)
            row |= {
                "total_bytes": weight_bytes + row["cache_bytes"] + reserve,
                "fits": fits(device, weight_bytes, peak, reserve),
                "max_tokens": max_tokens(policy, budget, shape, batch, page=page),
                "max_users": max_batch(
                    policy, budget, shape, tokens, prefix, page=page
                ),
                "attention_seconds": step["seconds"],
                "limit": step["limit"],
                "step_seconds": step["seconds"] + weight_bytes / device.bandwidth,
            }
        rows.append(row)
    return rows


def _weight_bytes(shape, weight_bytes):
    if weight_bytes is not None:
        return weight_bytes
    if shape.weight_params is None:
        raise ValueError(
            "weight_bytes=None and the shape's weight_params are unknown; valid: the "
            "bytes of the weights (0 plans for the cache alone)"
        )
    return 2 * shape.weight_params

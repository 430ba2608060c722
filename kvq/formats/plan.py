"""What a model's cache costs in another system's own format, pages included."""

import math

from kvq.formats import find_format
from kvq.formats.base import Format
from kvq.hardware import device as find_device
from kvq.memory import bytes_per_token, checked_integer, first, fits

# Tokens that a system allocates together, its default: llama.cpp pads n_ctx, vLLM's
# --block-size, TensorRT-LLM's tokens_per_block. The others grow by single tokens.
PAGE = {"ggml": 256, "vllm": 16, "tensorrt_llm": 32}

# vLLM leaves the first and last two layers of a dense model at 16 bits.
BOUNDARY = {"vllm:turboquant": 4}

LONG = 2**17  # tokens, so many that pages and residual no longer count

# Hugging Face keeps up to residual_length - 1 new tokens in full precision.
RESIDUAL = {"hf": 127}


# bytes(T) = B * sum over layers of nbytes(H, ceil(T / page) * page, D)  (+ residual)
def format_cache_bytes(name, shape, *, tokens, batch=1, page=None, rows=2):
    """Bytes of a cache of `batch` sequences of `tokens` tokens, at most.

    name : a format, such as "vllm:int4_per_token_head". shape : a `ModelShape`.
    page : tokens allocated together; None is the system's default.
    rows : bytes of a number that a system keeps in full precision.
    Raises ValueError for a format that cannot hold heads of this shape.
    """
    kind, system = find_format(name), name.partition(":")[0]
    page = _page(name, page)
    tokens = checked_integer("tokens", tokens, 0)
    batch = checked_integer("batch", batch, 1)
    total = 0
    for layers, held in shape.held(tokens):
        residual = min(held, RESIDUAL.get(system, 0))
        stored = math.ceil((held - residual) / page) * page
        full = residual * shape.kv_heads * sum(shape.widths) * rows
        total += layers * (_layer_bytes(kind, shape, stored) + full)
    return batch * (total + _boundary_bytes(kind, shape, tokens, page))


def _page(name, page):
    """Tokens allocated together: as given, or the system's default."""
    default = PAGE.get(name.partition(":")[0], 1)
    return default if page is None else checked_integer("page", page, 1)


def _boundary_bytes(kind, shape, tokens, page):
    """What layers that stay at 16 bits take beyond the format's own bytes."""
    layers = BOUNDARY.get(kind.name.partition("_")[0], 0)
    layers = min(layers, shape.growing_layers)
    if not layers:
        return 0
    stored = math.ceil(tokens / page) * page
    plain = stored * shape.kv_heads * sum(shape.widths) * 2
    return layers * (plain - _layer_bytes(kind, shape, stored))


def _layer_bytes(kind, shape, tokens):
    if tokens == 0:
        return 0
    H, widths = shape.kv_heads, shape.widths
    if isinstance(kind, Format):
        return sum(kind.nbytes((H, tokens, D)) for D in widths)
    if shape.latent:
        raise ValueError(f"{kind.name} stores keys and values; a latent has no values")
    return kind.nbytes((H, tokens, widths[0]), widths[1])


def format_plan(
    name,
    shape,
    device,
    tokens,
    batch=1,
    weight_bytes=0,
    reserve=0,
    *,
    prefix=0,
    page=None,
):
    """What the format costs and allows on a device: a row as `roofline.plan` gives.

    device=None : only what it costs. prefix : tokens that the sequences have in common
    and store once, in whole pages. The time of a step is that of moving its bytes; the
    instructions of other systems' kernels are not modelled.
    """
    page, prefix = _page(name, page), checked_integer("prefix", prefix, 0)
    batch = checked_integer("batch", batch, 1)

    def nbytes(T, B=1):
        return format_cache_bytes(name, shape, tokens=T, batch=B, page=page)

    one, slope = nbytes(tokens), (nbytes(2 * LONG) - nbytes(LONG)) / LONG
    bits = 16 * slope / bytes_per_token("fp16", shape) if slope else math.nan
    shared = _shared_bytes(name, shape, min(prefix, tokens) // page * page)
    row = {
        "policy": name,
        "bits_per_element": bits,
        "bytes_per_token": slope,
        "page_bytes": nbytes(page) * (page > 1),
        "cache_bytes": batch * one - (batch - 1) * shared,
    }
    if device is not None:
        device = find_device(device)
        budget = max(device.usable - weight_bytes - reserve, 0)
        row |= {
            "total_bytes": weight_bytes + row["cache_bytes"] + reserve,
            "fits": fits(device, weight_bytes, row["cache_bytes"], reserve),
            "max_tokens": _max_tokens(nbytes, shape, batch, budget),
            "max_users": max(int((budget - shared) // (one - shared)), 0),
        }
    row["max_speedup"] = 16 / bits
    if device is not None:
        seconds = batch * one / device.bandwidth  # shared pages are read by everyone
        row |= {
            "attention_seconds": seconds,
            "limit": "bandwidth",
            "step_seconds": seconds + weight_bytes / device.bandwidth,
        }
    return row


def _shared_bytes(name, shape, tokens):
    """Bytes of whole pages in the layers that grow; those that slide have moved on."""
    if not tokens or not shape.growing_layers:
        return 0
    return shape.growing_layers * _layer_bytes(find_format(name), shape, tokens)


def _max_tokens(nbytes, shape, batch, budget):
    """The largest T that fits: bytes(T) never falls. None if every length does."""
    limit = None if shape.growing_layers else shape.sliding_window
    too_long = first(lambda T: nbytes(T, batch) > budget, limit)
    return None if too_long is None else too_long - 1

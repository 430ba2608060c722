"""How fast a kernel can be, from what it costs: predicted for a device, never timed.

    t = overhead + max(bytes / bandwidth, instructions / issue rate, flops / peak)

    launch(device, ...)     the formula, for any kernel
    decode(device, ...)     one launch of v4 or v5, from the counts in budgets/
    ladder(device, bits)    every version of decode by the same formula
    first_tokens(...)       the context from which a speed-up is reached

A launch moves the packed codes, scales and zeros once. Its instructions are those of
the main loop (`budgets/tensor_cores.csv`, counted in machine code), its products those
of the tensor cores, padded to 8 or 16 query heads. The device's numbers are those of
`kvq.hardware`: the highest boost clock, a measured copy where there is one and else the
datasheet's bandwidth.

The formula lets everything overlap, with the queues always full: a kernel takes at
least `seconds`. If nothing overlapped it would take `seconds_apart`, the sum in place
of the maximum. What is measured should lie between them. Left out: the last, partly
filled round of a grid, page tables, the merge beyond `overhead`, caches that are warm.
"""

from kvq.hardware import device as find_device
from kvq.kernels import budgets
from kvq.kernels.budgets import tensor_cores
from kvq.kernels.pages import STEP

# Seconds of a launch that do not depend on its size: start, first bytes, last merge. An
# assumption, between 4 and 6 microseconds; `make bench-gpu` measures it.
OVERHEAD = 5e-6

# Machine code of which architecture stands for that of a device: the counts are those
# of sm_80 and sm_90, which differ by a few percent. A T4 (7.5) lacks the instructions.
CODE = {
    **dict.fromkeys(("H200", "H100-SXM"), 90),
    **dict.fromkeys(("A100-40GB", "A100-80GB", "A6000", "RTX-3090"), 80),
    **dict.fromkeys(("RTX-4090", "L4", "L40S", "RTX-5090"), 80),
}

# Tensor-core products for each one of q K^T and P V, by bits: sums of weights, zeros,
# and for 2 bits what lifts the codes. Counted: keys per channel, G = 64, D = 128.
PRODUCTS = {16: 68 / 64, 8: 80 / 64, 4: 80 / 64, 2: 96 / 64}


#     t = overhead + max(bytes / bandwidth, instructions / issue rate, flops / peak)
def launch(device, nbytes, instructions, flops=0, overhead=OVERHEAD):
    """The least time of a kernel, and what limits it.

    device : a Device or its name. nbytes : bytes that must move. instructions : of all
    lanes. flops : of the tensor cores. overhead : seconds.
    Returns a dict: bytes; memory_seconds, issue_seconds, matrix_seconds, what each of
    the three needs; seconds; seconds_apart, if nothing overlaps; limit: "bandwidth",
    "instructions", "tensor cores", or "overhead" where that is longer than all three;
    copy_percent, the bandwidth reached in percent of a copy's, and copy_percent_apart.
    """
    device = find_device(device)
    bandwidth = device.copy_bandwidth or device.bandwidth
    needs = {
        "bandwidth": nbytes / bandwidth,
        "instructions": instructions / device.issue_rate,
        "tensor cores": flops / device.fp16_flops,
    }
    seconds = overhead + max(needs.values())
    apart = overhead + sum(needs.values())
    return {
        "bytes": nbytes,
        "memory_seconds": needs["bandwidth"],
        "issue_seconds": needs["instructions"],
        "matrix_seconds": needs["tensor cores"],
        "seconds": seconds,
        "seconds_apart": apart,
        "limit": max({"overhead": overhead, **needs}.items(), key=lambda x: x[1])[0],
        "copy_percent": 100 * needs["bandwidth"] / seconds,
        "copy_percent_apart": 100 * needs["bandwidth"] / apart,
    }


def loop_cost(device, version="v5", bits=4, *, ratio=4, **setting):
    """The recorded row of a main loop: a step of 64 tokens of one KV head.

    version : "v4" or "v5". bits : 16 is the same kernel over float16; one setting is
    recorded, and stands for any D and ratio: it is far from the limit.
    setting : keys_per, G, value_G, D; by default "channel", 64, 64, 128.
    Raises ValueError that lists what is recorded.
    """
    name = find_device(device).name
    if name not in CODE:
        raise ValueError(f"device={name!r}; valid: {', '.join(CODE)}")
    wanted = {"kernel": f"decode_{version}", "bits": bits, "arch": CODE[name]}
    wanted |= {"exact": "float16"}
    setting = {"keys_per": "channel", "G": 64, "value_G": 64, "D": 128} | setting
    if bits != 16:
        heads = 16 if ratio > 8 and setting["D"] <= 128 else 4
        wanted |= setting | {"ratio": heads}
    rows = tensor_cores.recorded()[0]
    found = [row for row in rows if all(row[k] == v for k, v in wanted.items())]
    if found and bits == 16:
        return found[0] | {"D": setting["D"], "step_bytes": 4 * STEP * setting["D"]}
    if found:
        return found[0]
    known = dict.fromkeys(tuple(row[key] for key in wanted) for row in rows)
    raise ValueError(
        f"no cost recorded for {tuple(wanted.values())}; valid {tuple(wanted)}: "
        f"{', '.join(map(str, known))}"
    )


#     steps = B H_kv ceil(T / 64),   bytes = steps * bytes of a step,
#     instructions = bytes * instructions per byte,   flops = steps * 64 * 4 D heads * c
def decode(
    device,
    version="v5",
    bits=4,
    tokens=32768,
    *,
    batch=1,
    kv_heads=8,
    ratio=4,
    overhead=OVERHEAD,
    **setting,
):
    """`launch` of a decode step of one layer.

    tokens : T of each of `batch` sequences. ratio : query heads of a KV head; more
    than the kernel takes at a time (16; 8 at D = 256) read every page again.
    setting : as for `loop_cost`. Also in the dict: instructions_per_byte;
    issue_share, of the instructions that the device can start while a copy would move
    the bytes; effective_bits, the stored ones with scales and zeros; ceiling, the
    largest speed-up over 16 bits, 16 / effective_bits.
    Raises ValueError as `loop_cost` does.
    """
    row = loop_cost(device, version, bits, ratio=ratio, **setting)
    steps, D = batch * kv_heads * -(-tokens // STEP), row["D"]
    heads = 16 if ratio > 8 and D <= 128 else 8
    passes = -(-ratio // heads)
    nbytes = steps * row["step_bytes"]
    per_byte = passes * row["instructions_per_byte"]
    flops = passes * steps * STEP * 4 * D * heads * PRODUCTS[bits]
    found = launch(device, nbytes, nbytes * per_byte, flops, overhead)
    effective = 8 * row["step_bytes"] / (2 * STEP * D)
    return found | {
        "instructions_per_byte": per_byte,
        "issue_share": found["issue_seconds"] / found["memory_seconds"],
        "effective_bits": effective,
        "ceiling": 16 / effective,
    }


def ladder(device, bits=4, tokens=32768, **shape):
    """{version: `launch`} of v1 to v5. shape : as for `decode`, but no setting.

    v1 to v3 are taken from `budgets/sm_*.csv`: a run of 512 tokens in the simulator,
    ratio 4. Two of them are left out where their bits are not recorded. Their words
    are counted once, also where query heads read them again.
    """
    found = {v: decode(device, v, bits, tokens, **shape) for v in ("v4", "v5")}
    nbytes, overhead = found["v5"]["bytes"], shape.get("overhead", OVERHEAD)
    costs, _ = budgets.budgets(CODE[find_device(device).name])
    older = {
        version: launch(device, nbytes, nbytes * per_byte, overhead=overhead)
        for version in ("v1", "v2", "v3")
        if (row := costs.get((f"decode_{version}", bits)))
        for per_byte in [row["instructions_per_byte"]]
    }
    return older | found


#     speed-up(T) = t_16(T) / t_b(T)
def speedup(device, bits, tokens, version="v5", **shape):
    """Predicted time over 16 bits by that over `bits`, by the same kernel."""
    full, few = (decode(device, version, b, tokens, **shape) for b in (16, bits))
    return full["seconds"] / few["seconds"]


def first_tokens(device, bits, wanted=1.1, **shape):
    """The context, in steps of 64 tokens, from which `bits` are `wanted` times faster.

    Than 16 bits, see `speedup`. Returns T, or None if no length does: the ceiling is
    lower, or the limit is not the bandwidth.
    """
    low, high = 0, 2**24  # in steps: 2^30 tokens
    if speedup(device, bits, STEP * high, **shape) < wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        enough = speedup(device, bits, STEP * middle, **shape) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return STEP * high

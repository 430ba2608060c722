"""`kvq plan`: what a cache costs and how much of it fits."""

import math
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

from kvq.commands.common import UsageError, count, flag, names, print_json, size, table

DEFAULT_POLICIES = "fp16,int8-token,int4-token-g64,int4-channel-g32,kivi-4,kivi-2"
SHAPE = {
    "layers": "L, layers with keys and values",
    "kv_heads": "KV heads",
    "head_dim": "D, width of a key",
    "value_dim": "width of a value (default: D)",
    "q_heads": "query heads (default: KV heads)",
    "sliding_window": "tokens that a sliding layer keeps",
    "sliding_layers": "how many layers slide",
}
PLAN_NOTES = (
    "bits/number: scales and zeros counted. KiB/token, max tokens: of one sequence, "
    "all layers. max users: sequences of that many tokens.",
    "speed-up: the most that decode attention over a long cache can gain on fp16, the "
    "ratio of bytes.",
)


def add(commands):
    p = commands.add_parser("plan", help="what a cache costs and how much of it fits")
    model = p.add_argument_group("the model")
    model.add_argument(
        "--config",
        metavar="FILE|NAME",
        help="a Hugging Face config.json, or the name of a bundled one",
    )
    for name, text in SHAPE.items():
        model.add_argument(flag(name), type=int, metavar="N", help=text)
    model.add_argument(
        "--weights", type=size, metavar="SIZE", help="bytes of the weights: 15GiB"
    )
    model.add_argument(
        "--params", type=count, metavar="N", help="parameters of 2 bytes each: 8.03B"
    )
    load = p.add_argument_group("the load")
    load.add_argument(
        "--tokens", type=int, default=8192, metavar="T", help="tokens (default: 8192)"
    )
    load.add_argument(
        "--batch", type=int, default=1, metavar="B", help="sequences (default: 1)"
    )
    load.add_argument(
        "--prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all sequences have in common, stored once (default: 0)",
    )
    load.add_argument(
        "--page",
        type=int,
        metavar="N",
        help="tokens allocated together (default: the system's; 1 for presets)",
    )
    load.add_argument(
        "--policies",
        type=names,
        default=names(DEFAULT_POLICIES),
        metavar="A,B,...",
        help=f"presets or formats such as ggml:q8_0 (default: {DEFAULT_POLICIES})",
    )
    where = p.add_argument_group("the device")
    where.add_argument("--device", metavar="NAME", help="such as A100-80GB")
    where.add_argument(
        "--memory", type=size, metavar="SIZE", help="usable memory: 24GiB"
    )
    where.add_argument(
        "--reserve", type=size, default=0, metavar="SIZE", help="kept free: 2GiB"
    )
    where.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="ranks that split heads and weights evenly; the numbers are one rank's",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=plan)


def plan(options):
    """Print the plan: a table with its units, or JSON."""
    shape, device = _shape(options), _device(options)
    rank = shape.shard(options.tensor_parallel)
    weights = _weights(options, shape)
    rows = _plan_rows(rank, device, weights, options)
    advice = _plan_advice(shape, options)
    if options.json:
        facts = {k: getattr(options, k) for k in ("tokens", "batch", "tensor_parallel")}
        usable = device and device.usable
        facts |= {"usable_bytes": usable, "weight_bytes": weights}
        print_json({"shape": asdict(rank), **facts, "rows": rows, "advice": advice})
        return
    print(_plan_heading(rank, device, weights, options))
    paged = any(row["page_bytes"] for row in rows)
    cells = (_plan_cells(row, paged) for row in rows)
    print(*table([_plan_titles(device, paged), *cells]), sep="\n")
    print(*(textwrap.fill(text, 88) for text in [*PLAN_NOTES, *advice]), sep="\n")


def _shape(options):
    from kvq.memory import ModelShape

    given = {k: v for k, v in vars(options).items() if k in SHAPE and v is not None}
    if options.config is None:
        missing = {"layers", "kv_heads", "head_dim"} - set(given)
        if missing:
            raise UsageError(
                "the model is unknown: give --config, or --layers, --kv-heads and "
                "--head-dim"
            )
        return ModelShape(**given)
    if given:
        raise UsageError(f"{flag(next(iter(given)))} and --config exclude each other")
    return ModelShape.from_config(_config_path(options.config))


def _config_path(name):
    """A path, or a bundled configuration of that name."""
    from importlib.resources import files

    bundled = {
        path.name.removesuffix(".json"): path
        for path in (files("kvq") / "data" / "configs").iterdir()
        if path.name.endswith(".json")
    }
    if name in bundled and not Path(name).exists():
        return bundled[name]
    if not Path(name).exists():
        valid = ", ".join(sorted(bundled))
        raise ValueError(f"no file {name}; bundled configurations: {valid}")
    return name


def _weights(options, shape):
    """Bytes of the weights on each rank, or None where nothing says."""
    if options.weights is not None and options.params is not None:
        raise UsageError("--weights and --params exclude each other")
    weights = options.weights
    if weights is None:
        params = shape.weight_params if options.params is None else options.params
        weights = params if params is None else 2 * params
    return weights if weights is None else math.ceil(weights / options.tensor_parallel)


def _device(options):
    """The device, its memory as --memory says; None if neither is given."""
    from kvq.hardware import Device, device

    if options.device is None and options.memory is None:
        return None
    if options.device is not None:
        found = device(options.device)
        return (
            found if options.memory is None else replace(found, usable=options.memory)
        )
    size, inf = options.memory, math.inf  # nothing but its memory is known
    return Device("memory", size, size, inf, None, 1, inf, inf, 0, "--memory")


def _plan_rows(shape, device, weights, options):
    from kvq.formats.plan import format_plan
    from kvq.roofline import plan as plan_rows

    if device is not None and weights is None:
        raise UsageError(
            "how large are the weights? give --weights or --params (0 plans for the "
            "cache alone)"
        )
    where = (options.tokens, options.batch, weights, options.reserve)
    shared, page = {"prefix": options.prefix}, options.page
    rows = []
    for name in options.policies:
        if ":" in name:  # another system's own format, and its own page
            rows.append(format_plan(name, shape, device, *where, **shared, page=page))
        else:
            rows += plan_rows(
                shape,
                device,
                [name],
                *where,
                **shared,
                page=1 if page is None else page,
            )
    if device is not None and device.bandwidth == math.inf:
        for row in rows:  # times would be times of no device
            del row["attention_seconds"], row["limit"], row["step_seconds"]
    return rows


def _plan_heading(shape, device, weights, options):
    from kvq.memory import format_bytes

    rank = f", one of {options.tensor_parallel} ranks" * (options.tensor_parallel > 1)
    heads = "a latent" if shape.latent else f"{shape.kv_heads} KV heads"
    text = (
        f"{shape.layers} layers, {heads} of {shape.head_dim}{rank}; "
        f"{options.tokens:,} tokens in each of {options.batch:,} sequences"
    )
    if shape.sliding_layers:
        text += (
            f"; {shape.sliding_layers} layers keep the newest {shape.sliding_window:,}"
        )
    if device is None:
        return text
    name = "" if device.name == "memory" else f"{device.name}: "
    reserve = f", reserve {format_bytes(options.reserve)}" * (options.reserve > 0)
    return (
        f"{text}\n{name}{format_bytes(device.usable)} usable, "
        f"weights {format_bytes(weights)}{reserve}"
    )


def _plan_titles(device, paged):
    sizes = ["policy", "bits/number", "KiB/token", *["KiB/page"] * paged, "cache"]
    fits = [] if device is None else ["total", "fits", "max tokens", "max users"]
    known = device is not None and device.bandwidth < math.inf
    return [*sizes, *fits, "speed-up <=", *(["limited by"] if known else [])]


def _plan_cells(row, paged):
    from kvq.memory import format_bytes

    cells = [
        row["policy"],
        f"{row['bits_per_element']:.3f}",
        f"{row['bytes_per_token'] / 1024:.2f}",
        *[f"{row['page_bytes'] / 1024:,.0f}"] * paged,
        format_bytes(row["cache_bytes"]),
    ]
    if "fits" in row:
        longest = row["max_tokens"]
        cells += [
            format_bytes(row["total_bytes"]),
            "yes" if row["fits"] else "no",
            "any" if longest is None else f"{longest:,}",
            f"{row['max_users']:,}",
        ]
    cells.append(f"{row['max_speedup']:.2f}x")
    return [*cells, row["limit"]] if "limit" in row else cells


def _plan_advice(shape, options):
    """What the numbers do not show: a list of sentences."""
    advice = []
    if shape.max_positions and options.tokens > shape.max_positions:
        advice.append(f"note: the model was made for {shape.max_positions:,} tokens.")
    risky = [name for name in options.policies if _coarse_keys(name)]
    return advice + ([_key_advice(risky)] if risky else [])


def _coarse_keys(name):
    """Are keys stored per token, unrotated, in 4 bits or fewer?"""
    from kvq.scheme import policy

    if ":" in name:
        return False
    key = policy(name).key
    return key.per == "token" and key.transform is None and key.bits <= 4


def _key_advice(risky):
    """Why not, measured on the bundled sample."""
    from kvq.metrics import nmse
    from kvq.samples import real_kv
    from kvq.scheme import Scheme
    from kvq.tensor import quantize

    sample = real_kv()
    token, channel = (
        nmse(
            sample.k, quantize(sample.k, Scheme(4, per, 32, "asymmetric")).dequantize()
        )
        for per in ("token", "channel")
    )
    return (
        f"note: {', '.join(risky)}: some channels of real keys are large at every "
        "token, and a scale per token lets all others pay for them. On "
        f"{sample.name}, 4 bits, G=32, it leaves {token / channel:.1f} times the "
        "squared error of a scale per channel. Prefer kivi-4, kivi-2 or "
        "int4-channel-g32."
    )

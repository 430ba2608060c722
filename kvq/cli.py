"""The `kvq` command: plan, study, presets, lessons, doctor.

Results go to stdout, everything else to stderr. Exit codes: 0; 2 with one line for
wrong input; 130 after Ctrl-C. Heavy imports happen inside the commands.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

DEFAULT_POLICIES = "fp16,int8-token,int4-token-g64,int4-channel-g32,kivi-4,kivi-2"
EXTRAS = dict.fromkeys(("joblib", "matplotlib", "safetensors", "tqdm"), "[study]")


class UsageError(ValueError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


# --- numbers with units ---------------------------------------------------------------
def _number(text, units, what):
    """`text` is a number and one of `units` (a dict: name, in lower case -> factor)."""
    text = text.strip()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    factor = units.get(text[len(digits) :].lower())
    try:
        value = float(digits.replace(",", "")) * factor
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return round(value)


def size(text):
    """Bytes: 16000000000, 16GB or 14.9GiB."""
    units = {"": 1, "b": 1}
    for i, letter in enumerate("kmgt", 1):
        units |= {f"{letter}b": 1000**i, f"{letter}ib": 1024**i}
    return _number(text, units, "a size; valid: 24GiB, 13.5GB, 8000000000")


def count(text):
    """Parameters: 8030261248, 8.03B or 135M."""
    units = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    return _number(text, units, "a number of parameters; valid: 8.03B, 135M, 7e9")


def integers(text):
    """A list of integers: 2,4,8."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        message = f"{text!r} is not a list of integers; valid: 2,4,8"
        raise argparse.ArgumentTypeError(message) from None


def names(text):
    """A list of names: token,channel."""
    return [item.strip() for item in text.split(",")]


# --- tables ---------------------------------------------------------------------------
def table(rows):
    """Aligned text of rows (lists of str), the first one the heading, the first
    column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def print_json(value):
    """Strict JSON: a number that is not finite is null."""

    def finite(v):
        if isinstance(v, dict):
            return {k: finite(x) for k, x in v.items()}
        if isinstance(v, list):
            return [finite(x) for x in v]
        return None if isinstance(v, float) and not math.isfinite(v) else v

    print(json.dumps(finite(value), indent=1))


def note(text):
    print(text, file=sys.stderr)


# --- kvq plan -------------------------------------------------------------------------
SHAPE = {
    "layers": "L, layers with keys and values",
    "kv_heads": "KV heads",
    "head_dim": "D, width of a key",
    "value_dim": "width of a value (default: D)",
    "q_heads": "query heads (default: KV heads)",
    "sliding_window": "tokens that a sliding layer keeps",
    "sliding_layers": "how many layers slide",
}


def add_plan(commands):
    p = commands.add_parser("plan", help="what a cache costs and how much of it fits")
    model = p.add_argument_group("the model")
    model.add_argument(
        "--config",
        metavar="FILE|NAME",
        help="a Hugging Face config.json, or the name of a bundled one",
    )
    for name, text in SHAPE.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=int, help=text)
    model.add_argument(
        "--weights", type=size, metavar="SIZE", help="bytes of the weights: 15GiB"
    )
    model.add_argument(
        "--params", type=count, metavar="N", help="parameters of 2 bytes each: 8.03B"
    )
    load = p.add_argument_group("the load")
    load.add_argument("--tokens", type=int, default=8192, help="T (default: 8192)")
    load.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    load.add_argument(
        "--policies",
        type=names,
        default=names(DEFAULT_POLICIES),
        metavar="A,B,...",
        help=f"presets (default: {DEFAULT_POLICIES})",
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
        help="ranks that share heads and weights; numbers are those of one rank",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=plan)


def plan(options):
    """Print the plan: a table, or JSON with the shape, the rows and the notes."""
    shape, weights = _shape(options), _weights(options)
    if weights is None and shape.weight_params:
        weights = 2 * shape.weight_params
    if weights is not None:
        weights = math.ceil(weights / options.tensor_parallel)
    rank = shape.shard(options.tensor_parallel)
    device = _device(options)
    rows = _plan_rows(rank, device, weights, options)
    notes = _plan_notes(shape, options)
    if options.json:
        print_json({"shape": asdict(shape), "rows": rows, "notes": notes})
        return
    print(_plan_heading(rank, device, weights, options))
    print(*table([_plan_titles(device), *map(_plan_cells, rows)]), sep="\n")
    print(*notes, sep="\n")


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
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{flag} and --config exclude each other")
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


def _weights(options):
    """Bytes of the weights, if the options say."""
    if options.weights is not None and options.params is not None:
        raise UsageError("--weights and --params exclude each other")
    return options.weights if options.params is None else 2 * options.params


def _device(options):
    """The device, its memory as --memory says; None if neither is given."""
    from kvq.hardware import Device, device

    if options.device is None and options.memory is None:
        return None
    if options.device is not None:
        found = device(options.device)
        return found if options.memory is None else replace(found, usable=options.memory)
    size, inf = options.memory, math.inf  # nothing but its memory is known
    return Device("memory", size, size, inf, None, 1, inf, inf, 0, "--memory")

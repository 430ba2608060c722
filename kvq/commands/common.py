"""What the commands share: numbers with units, tables, JSON, the data to work on."""

import argparse
import json
import math
import sys


class UsageError(ValueError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


def flag(name):
    """The option of a setting: --kv-heads of kv_heads."""
    return "--" + name.replace("_", "-")


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


def positive(text):
    """A number above 0."""
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def names(text):
    """A list of names: token,channel."""
    return [item.strip() for item in text.split(",")]


# --- tables ---------------------------------------------------------------------------
def table(rows, left=(0,)):
    """Lines of aligned text. rows : lists of str, the first one the titles.
    left : columns that are flush left; the others are flush right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
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


# --- data ---------------------------------------------------------------------------
def load_sample(options):
    """The Sample that --data and --layer name. Raises ValueError."""
    from kvq.samples import load_kv, real_kv, synthetic_kv

    layer = {} if options.layer is None else {"layer": options.layer}
    if options.data == "real":
        return real_kv(**layer)
    if options.data == "synthetic":
        if layer:
            raise UsageError("synthetic data has no layers; valid: no --layer")
        return synthetic_kv()
    try:
        return load_kv(options.data, **layer)
    except TypeError as error:  # integers, where numbers were expected
        raise ValueError(error) from None

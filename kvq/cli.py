"""The `kvq` command: its grammar, and plan, study, presets, lessons, doctor.

The commands on formats and models are beside what they run, in `formats.commands` and
`model.commands`.

Results go to stdout, everything else to stderr. Exit codes: 0; 2 with one line for
wrong input; 130 after Ctrl-C. Heavy imports happen inside the commands.
"""

import argparse
import json
import math
import os
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

DEFAULT_POLICIES = "fp16,int8-token,int4-token-g64,int4-channel-g32,kivi-4,kivi-2"
EXTRAS = dict.fromkeys(("joblib", "matplotlib", "safetensors", "tqdm"), "[study]")
EXTRAS |= dict.fromkeys(("gguf", "tokenizers"), "[model]")


class UsageError(ValueError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


def _flag(name):
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
PLAN_NOTES = (
    "bits/number: scales and zeros counted. KiB/token, max tokens: of one sequence, "
    "all layers. max users: sequences of that many tokens.",
    "speed-up: the most that decode attention over a long cache can gain on fp16, the "
    "ratio of bytes.",
)


def add_plan(commands):
    p = commands.add_parser("plan", help="what a cache costs and how much of it fits")
    model = p.add_argument_group("the model")
    model.add_argument(
        "--config",
        metavar="FILE|NAME",
        help="a Hugging Face config.json, or the name of a bundled one",
    )
    for name, text in SHAPE.items():
        model.add_argument(_flag(name), type=int, metavar="N", help=text)
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
    print(*table([_plan_titles(device), *map(_plan_cells, rows)]), sep="\n")
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
        raise UsageError(f"{_flag(next(iter(given)))} and --config exclude each other")
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
    from kvq.memory import bits_per_element, bytes_per_token
    from kvq.roofline import max_speedup
    from kvq.roofline import plan as plan_rows

    T, B = options.tokens, options.batch
    if device is not None and weights is None:
        raise UsageError(
            "how large are the weights? give --weights or --params (0 plans for the "
            "cache alone)"
        )
    rows = []
    for name in options.policies:
        if ":" in name:  # another system's own format
            rows.append(
                format_plan(
                    name,
                    shape,
                    device,
                    T,
                    B,
                    weights,
                    options.reserve,
                    prefix=options.prefix,
                    page=options.page,
                )
            )
        elif device is None:
            rows.append(
                {
                    "policy": name,
                    "bits_per_element": bits_per_element(name, shape),
                    "bytes_per_token": bytes_per_token(name, shape),
                    "cache_bytes": _cache_bytes(name, shape, options),
                    "max_speedup": max_speedup(name, shape),
                }
            )
        else:
            rows += plan_rows(
                shape,
                device,
                [name],
                T,
                B,
                weights,
                options.reserve,
                prefix=options.prefix,
                page=options.page or 1,
            )
    if (
        device is not None and device.bandwidth == math.inf
    ):  # times would be times of no device
        for row in rows:
            del row["attention_seconds"], row["limit"], row["step_seconds"]
    return rows


def _cache_bytes(name, shape, options):
    """Bytes of all sequences, what they share counted once."""
    from kvq.memory import cache_bytes, shared_bytes

    T, B, page = options.tokens, options.batch, options.page or 1
    shared = shared_bytes(name, shape, T, options.prefix, page)
    return cache_bytes(name, shape, tokens=T, batch=B, page=page) - (B - 1) * shared


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


def _plan_titles(device):
    sizes = ["policy", "bits/number", "KiB/token", "cache"]
    fits = [] if device is None else ["total", "fits", "max tokens", "max users"]
    known = device is not None and device.bandwidth < math.inf
    return [*sizes, *fits, "speed-up <=", *(["limited by"] if known else [])]


def _plan_cells(row):
    from kvq.memory import format_bytes

    cells = [
        row["policy"],
        f"{row['bits_per_element']:.3f}",
        f"{row['bytes_per_token'] / 1024:.2f}",
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


# --- kvq study ------------------------------------------------------------------------
# How a study's table is shown: (row keys, column key, cell).
VIEWS = {
    "group-size": (("tensor", "per", "bits"), "group", "nmse"),
    "bits": (("tensor", "levels"), "bits", "sqnr_db"),
    "axis": (("tensor", "bits"), "per", "nmse"),
    "key-vs-value": (("tensor", "per"), "bits", "output_error"),
    "residual": (("bits", "sinks"), "residual", "output_error"),
    "rotation": (("per", "transform", "smooth"), "bits", "output_error"),
    "codebook": (("per", "codebook"), "tensor", "sqnr_db"),
}
SWEEPS = {
    "bits": (integers, "2,4", "bits per code"),
    "per": (names, "token,channel", "which numbers share a scale"),
    "group": (int, "G", "group size, where it is fixed"),
    "groups": (integers, "8,32", "group sizes to sweep"),
    "levels": (names, "NAME", "symmetric or asymmetric"),
    "windows": (integers, "0,128", "residual windows to sweep"),
    "sinks": (integers, "0,4", "first tokens kept in full precision"),
    "rope_base": (positive, "BASE", "RoPE base of the keys, to undo it"),
}


def add_study(commands):
    p = commands.add_parser("study", help="one sweep as a table and a picture")
    p.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(VIEWS)}")
    p.add_argument(
        "--data",
        default="real",
        metavar="real|synthetic|FILE",
        help="the bundled sample (default), or a .npz or .safetensors file with k, v "
        "(H, T, D) and q, or k_3, v_3, q_3 with --layer 3",
    )
    p.add_argument("--layer", type=int, metavar="N", help="layer of the data")
    p.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes; -1: one per core"
    )
    p.add_argument(
        "--out",
        type=Path,
        default=Path("kvq-study"),
        metavar="FOLDER",
        help="where NAME.csv, .png and .svg go (default: kvq-study)",
    )
    for name, (kind, metavar, text) in SWEEPS.items():
        p.add_argument(_flag(name), type=kind, metavar=metavar, help=text)
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.add_argument("--json", action="store_true", help="print the rows as JSON")
    p.set_defaults(run=study)


def study(options):
    """Run a sweep, write its table and its picture, print what was found.

    Without a name, list the studies.
    """
    from kvq.study import STUDIES

    name = options.name
    if name is None:
        rows = ([n, _question(f)] for n, f in STUDIES.items())
        print(*table(rows, left=(0, 1)), sep="\n")
        return
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}; valid: {', '.join(STUDIES)}")
    import matplotlib  # fails here, not after the work

    matplotlib.use("Agg")  # no window, whatever the caller's settings
    settings = _study_settings(STUDIES[name], options)
    _check_folder(options.out)
    sample = load_sample(options)
    rows = STUDIES[name](
        sample, jobs=options.jobs, progress=not options.quiet, **settings
    )
    _write_study(options, settings, sample, rows)
    if options.json:
        print_json(rows)
    else:
        keys, _, cell = VIEWS[name]
        print(f"{_question(STUDIES[name])} {sample.name}: {cell}")
        print(*table(pivot(rows, *VIEWS[name]), range(len(keys))), sep="\n")


def _question(study):
    return study.__doc__.splitlines()[0]


def _study_settings(function, options):
    """The sweep's arguments that were given, checked against what it takes."""
    import inspect

    takes = {
        p.name: p.default
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    given = {k: v for k, v in vars(options).items() if k in SWEEPS and v is not None}
    for name, value in given.items():
        if name not in takes:
            valid = ", ".join(map(_flag, takes))
            raise UsageError(f"{options.name} has no {_flag(name)}; valid: {valid}")
        if isinstance(takes[name], str):  # one word, where others take several
            if len(value) != 1:
                raise UsageError(f"{options.name} takes one value for {_flag(name)}")
            given[name] = value[0]
    if options.name == "axis" and options.data == "real":
        from kvq.samples import ROPE_BASE

        given.setdefault("rope_base", ROPE_BASE)
    return given


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


def _check_folder(folder):
    """Fail before the work if files cannot be written to `folder` after it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"cannot write to {folder}: {existing} is not a folder for it")


def _write_study(options, settings, sample, rows):
    """NAME.csv, NAME.svg and NAME.png: all of them, or none."""
    import tempfile

    from kvq import plots
    from kvq.study import STUDIES, provenance, write_table

    name, out = options.name, options.out
    header = {"data": sample.name, **provenance(_command(options, settings))}
    figure = plots.figure(name, rows, _question(STUDIES[name]), sample.name)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as temporary:
        temporary = Path(temporary)
        write_table(temporary / f"{name}.csv", rows, header)
        plots.save(figure, temporary / name)
        for path in sorted(temporary.iterdir()):
            os.replace(path, out / path.name)
            note(f"wrote {out / path.name}")


def _command(options, settings):
    """The command that gives these rows again; a file by its name alone."""
    words = ["kvq study", options.name, "--data", Path(options.data).name]
    for name, value in {"layer": options.layer, **settings}.items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words += [_flag(name), str(text)]
    return " ".join(words)


def pivot(rows, keys, column, cell):
    """Rows of text: a line for each combination of `keys`, a column for each value
    of `column`, and `cell` where they meet."""
    columns = sorted({row[column] for row in rows})
    lines = {}
    for row in rows:
        line = lines.setdefault(tuple(str(row[k]) for k in keys), {})
        line[row[column]] = f"{row[cell]:.3g}"
    yield [*keys, *(f"{column}={c}" for c in columns)]
    for key, line in lines.items():
        yield [*key, *(line.get(c, "") for c in columns)]


# --- kvq presets ----------------------------------------------------------------------
def add_presets(commands):
    p = commands.add_parser("presets", help="the named policies")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=presets)


def presets(options):
    """Print every preset: keys, values, window, and bits per number."""
    from kvq.memory import ModelShape, cache_bytes
    from kvq.scheme import PRESETS

    T, D = 8192, 128
    shape = ModelShape(layers=1, kv_heads=1, head_dim=D)
    bits = {
        name: 8 * cache_bytes(name, shape, tokens=T) / shape.numbers(T)
        for name in PRESETS
    }
    if options.json:
        print_json(
            [asdict(p) | {"bits_per_element": bits[n]} for n, p in PRESETS.items()]
        )
        return
    rows = [
        [name, f"{bits[name]:.3f}", str(p.residual), describe(p.key), _values(p)]
        for name, p in PRESETS.items()
    ]
    titles = ["policy", "bits/number", "window", "keys", "values"]
    print(*table([titles, *rows], left=(0, 3, 4)), sep="\n")
    print(f"bits/number: T={T:,}, D={D}, with scales, zeros and window (in float16)")


def _values(policy):
    return "the same" if policy.value == policy.key else describe(policy.value)


def describe(scheme):
    """A scheme in a few words."""
    if scheme.full_precision:
        return scheme.levels
    group = f"G={scheme.group}" if scheme.group else "one group"
    words = [f"{scheme.bits} bits per {scheme.per}", group, scheme.levels]
    if scheme.scale_dtype != "float16":
        words.append(scheme.scale_dtype)
    return ", ".join(words + ([scheme.transform] if scheme.transform else []))


# --- kvq lessons ----------------------------------------------------------------------
def add_lessons(commands):
    p = commands.add_parser("lessons", help="the lessons and where they are")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=lessons)


def lessons(options):
    """List the lessons of the checkout that this package belongs to."""
    import kvq

    folder = Path(kvq.__file__).resolve().parents[1] / "lessons"
    found = [
        {
            "name": source.stem,
            "title": _title(source),
            "notebook": str(folder / f"{source.stem}.ipynb"),
            "page": str(page) if page.exists() else None,
        }
        for source in sorted((folder / "src").glob("[0-9][0-9]_*.py"))
        for page in [folder / "html" / f"{source.stem}.html"]
    ]
    if not found:
        raise ValueError("no lessons here: they are in a checkout, not in the package")
    if options.json:
        print_json(found)
        return
    rows = [[x["name"], "yes" if x["page"] else "no", x["title"]] for x in found]
    titles = ["notebook", "page built", "title"]
    print(*table([titles, *rows], left=(0, 1, 2)), sep="\n")
    print(f"notebooks: {folder}/NAME.ipynb; solutions: {folder}/solutions/NAME.ipynb")
    print(f"pages: {folder}/html/index.html, written by `make lessons`")


def _title(source):
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("# # "):
            return line[4:]
    return source.stem


# --- kvq doctor -----------------------------------------------------------------------
def add_doctor(commands):
    p = commands.add_parser("doctor", help="what this machine has and can run")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=doctor)


def doctor(options):
    """Print versions, processor, GPU (or why none) and which backends can run."""
    from kvq.doctor import examine, lines

    report = examine()
    if options.json:
        print_json(report)
    else:
        print(*lines(report), sep="\n")


# --- the command ----------------------------------------------------------------------
def parser():
    """The command line's grammar."""
    from kvq import __version__

    p = Parser(prog="kvq", description="KV-cache quantization: plan, study, learn.")
    p.add_argument("--version", action="version", version=f"kvq {__version__}")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from kvq.formats.commands import add_convert, add_formats
    from kvq.model.commands import add_commands

    for add in (
        add_plan,
        add_study,
        add_presets,
        add_formats,
        add_convert,
        add_commands,
        add_lessons,
        add_doctor,
    ):
        add(commands)
    return p


def main(argv=None):
    """Run the command line `argv` (default: sys.argv). Returns the exit code."""
    try:
        options = parser().parse_args(argv)
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(package)
        remedy = f"kvq-reference{extra}" if extra else package
        return _fail(f"{error}: pip install '{remedy}'" if package else error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except ValueError as error:
        return _fail(error)
    return 0


def _fail(error):
    """One line on stderr. Returns 2."""
    note("kvq: error: " + " ".join(str(error).split()))
    return 2

"""`kvq bench cpu`: pack, dequant and decode timed here, beside other programs."""

from pathlib import Path

from kvq.commands.common import (
    UsageError,
    integers,
    names,
    positive,
    print_json,
    table,
)

DESCRIPTION = (
    "Time pack, dequant and decode on this machine, in turns with NumPy, torch, ggml, "
    "optimum-quanto, HQQ and gguf, as far as they are installed (ggml comes with "
    "llama-cpp-python). Leave the machine alone meanwhile, and set "
    "OPENBLAS_NUM_THREADS=1: NumPy's threads are counted apart."
)
TITLES = (
    *("scene", "op", "system", "version", "storage", "group", "T", "H_q", "threads"),
    *("MB", "ms", "quartiles", "DRAM", "roofline", "error"),
)


def add(commands):
    p = commands.add_parser("bench", help="how fast this machine is, beside others")
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    p = actions.add_parser("cpu", help="the CPU backend", description=DESCRIPTION)
    p.add_argument("--quick", action="store_true", help="short contexts, <= 60 s")
    p.add_argument(
        "--tokens", type=integers, metavar="A,B,...", help="contexts, multiples of 64"
    )
    p.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    p.add_argument(
        "--only", type=names, metavar="A,B", help="of decode, pack, dequant, step"
    )
    p.add_argument(
        "--model-step", action="store_true", help="also a token through 32 layers"
    )
    p.add_argument(
        "--seconds", type=positive, metavar="N", help="about how long (default: 300)"
    )
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the rows")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=cpu)


def cpu(options):
    """Measure, print every row, and say which goals hold."""
    from kvq.kernels.cpu import bench, goals

    settings = _settings(options, bench)
    if options.csv and not options.csv.absolute().parent.is_dir():
        raise ValueError(f"cannot write {options.csv}: its folder does not exist")
    header = _header(options, settings, bench)
    rows = []
    for more in bench.run(settings, iter if options.quiet else _progress):
        rows += more
        if options.csv:
            _write(options.csv, bench.finished(rows), header)
    rows = bench.finished(rows)
    verdicts = goals.verdicts(rows)
    if options.json:
        print_json({"conditions": header, "rows": rows, "goals": verdicts})
        return
    print(*table(_lines(rows), left=range(5)), sep="\n")
    print(*_notes(rows), "", *_goals(verdicts), sep="\n")


def _settings(options, bench):
    """A bench.Settings. Raises UsageError."""
    from kvq.kernels.cpu.threads import cores

    tokens = options.tokens or (bench.QUICK if options.quick else bench.TOKENS)
    for T in tokens:
        if T < 64 or T % 64:
            raise UsageError(f"--tokens {T}; valid: multiples of 64")
    threads = cores() if options.threads is None else options.threads
    if not 1 <= threads <= cores():
        raise UsageError(f"--threads {threads}; valid: 1 to {cores()}")
    only = options.only or list(bench.OPS[:-1])
    for op in only:
        if op not in bench.OPS:
            raise UsageError(f"--only {op}; valid: {', '.join(bench.OPS)}")
    if options.model_step:
        only = dict.fromkeys([*only, "step"])
    return bench.Settings(
        tokens=tuple(sorted(set(tokens))),
        threads=threads,
        shapes=bench.SHAPES[:1] if options.quick else bench.SHAPES,
        only=tuple(only),
        seconds=options.seconds or (30.0 if options.quick else bench.Settings.seconds),
    )


def _header(options, settings, bench):
    """What the file says about itself."""
    from kvq.kernels.cpu import peers
    from kvq.tables import provenance

    words = ["kvq bench cpu", "--threads", str(settings.threads)]
    for name in ("tokens", "only"):
        if given := getattr(options, name):
            words += [f"--{name}", ",".join(map(str, given))]
    words += ["--seconds", f"{settings.seconds:g}"]
    words += ["--quick"] if options.quick else []
    words += ["--model-step"] if options.model_step else []
    header = provenance(" ".join(words))
    versions = [f"{name} {v}" for name, v in peers.versions().items()]
    header["versions"] = ", ".join([header["versions"], *versions])
    return header | bench.conditions(settings)


def _write(path, rows, header):
    from kvq.tables import write_table

    write_table(path, rows, header)


def _progress(scenes):
    """tqdm, where it is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return scenes
    return tqdm(scenes, unit="scene", leave=False)


# --- what is printed ------------------------------------------------------------------
def _lines(rows):
    yield TITLES
    for row in rows:
        if not row["seconds"]:
            continue
        cells = [row[key] for key in ("scene", "op", "system", "version", "storage")]
        cells += [row[key] for key in ("group", "T", "H_q", "threads")]
        low, high = (f"{1e3 * row[f'seconds_{end}']:.3f}" for end in ("low", "high"))
        yield [
            *("" if cell is None else str(cell) for cell in cells),
            _number(row["nbytes"], ".2f", 1e-6),
            _number(row["seconds"], ".3f", 1e3),
            f"{low} .. {high}",
            _number(row["dram_percent"], ".0f", unit=" %"),
            _number(row["roofline_percent"], ".0f", unit=" %"),
            _number(row["error"], ".1e"),
        ]


def _number(value, form, factor=1, unit=""):
    return "" if value is None else format(factor * value, form) + unit


def _notes(rows):
    """What was not measured, and why, each reason once."""
    for text in dict.fromkeys(row["note"] for row in rows if row["note"]):
        them = [row for row in rows if row["note"] == text]
        parts = ([r["system"], r["version"], r["storage"]] for r in them)
        who = dict.fromkeys(" ".join(filter(None, part)) for part in parts)
        yield f"{', '.join(who)}: {text}"


def _goals(verdicts):
    lines = [("goal", "asked", "measured", "")]
    for goal in verdicts:
        measured = _number(goal["measured"], ",.3g", unit=goal["unit"])
        measured = measured.replace(f"inf{goal['unit']}", "none")
        lines.append((goal["goal"], goal["asked"], measured, goal["verdict"]))
    return table(lines, left=(0, 3))

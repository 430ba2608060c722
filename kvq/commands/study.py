"""`kvq study`: one sweep as a table and a picture."""

import os
from pathlib import Path

from kvq.commands.common import (
    UsageError,
    flag,
    integers,
    load_sample,
    names,
    note,
    positive,
    print_json,
    table,
)

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


def add(commands):
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
        p.add_argument(flag(name), type=kind, metavar=metavar, help=text)
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
            valid = ", ".join(map(flag, takes))
            raise UsageError(f"{options.name} has no {flag(name)}; valid: {valid}")
        if isinstance(takes[name], str):  # one word, where others take several
            if len(value) != 1:
                raise UsageError(f"{options.name} takes one value for {flag(name)}")
            given[name] = value[0]
    if options.name == "axis" and options.data == "real":
        from kvq.samples import ROPE_BASE

        given.setdefault("rope_base", ROPE_BASE)
    return given


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
    from kvq.study import STUDIES
    from kvq.tables import provenance, write_table

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
            words += [flag(name), str(text)]
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

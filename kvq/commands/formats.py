"""`kvq formats` and `kvq convert`."""

import os
import tempfile
from pathlib import Path

from kvq.commands.common import load_sample, print_json, table


def add_formats(commands):
    p = commands.add_parser("formats", help="the cache formats of other systems")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--markdown", action="store_true", help="print kvq/formats/README")
    p.set_defaults(run=formats)


def formats(options):
    """Print what every format is, or with --json all that is known of it."""
    from kvq.formats.convert import table as rows_of_all

    rows = rows_of_all()
    if options.json:
        print_json(rows)
        return
    if options.markdown:
        from kvq.formats.convert import markdown

        print(markdown(), end="")
        return
    titles = ["format", "bits per number", "group", "zero", "rounding", "window"]
    lines = [titles, *([row[t] for t in titles] for row in rows)]
    print(*table(lines, left=(0, 2, 3, 4, 5)), sep="\n")
    print("bits per number: 128 tokens of a head of 128 channels; --json: all fields")


def add_convert(commands):
    p = commands.add_parser("convert", help="from format to format, errors counted")
    p.add_argument("names", nargs="+", metavar="FORMAT", help="in order: ggml:q4_0 ...")
    p.add_argument(
        "--data",
        default="real",
        metavar="real|synthetic|FILE",
        help="the bundled sample (default), or a .npz or .safetensors file",
    )
    p.add_argument("--layer", type=int, help="layer of the data")
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where the last format's bytes go: k, then v",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=convert)


def convert(options):
    """Store keys and values in each format in turn; print the error that each adds."""
    from kvq.formats.convert import convert as through

    sample = load_sample(options)
    rows, data = through(sample.k, sample.v, options.names)
    if options.out is not None:
        _write(options.out, b"".join(data))
    if options.json:
        print_json(rows)
        return
    print(f"{sample.name}: squared error / signal of this step, and of all so far")
    errors = ("k_step", "k_total", "v_step", "v_total")
    lines = [
        [
            row["format"],
            f"{row['bytes']:,}",
            f"{row['bits']:.3f}",
            *(f"{row[e]:.3g}" for e in errors),
        ]
        for row in rows
    ]
    titles = ["format", "bytes", "bits/number", "k step", "k all", "v step", "v all"]
    print(*table([titles, *lines]), sep="\n")


def _write(path, data):
    """All of `data` in the file `path`, or no such file."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

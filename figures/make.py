"""Compute every figure's data and draw it: plot_x.py -> data/x.csv, x.svg, x.png.

    python figures/make.py [NAME ...]    all figures, or those named
    python figures/make.py --check       compute again, compare, write nothing

A plot script's docstring begins with the finding, in one line. The script defines

    NAME                     the stem of its three files
    data()                   its numbers: a list of dicts, one per row
    draw(table, path_stem)   writes path_stem.svg and path_stem.png from such rows,
                             through kvq.plots.save: the same bytes on every run

Pictures are drawn from the recorded CSV. A CSV whose numbers still hold is left as it
is, so that another machine's last digits do not rewrite it.
"""

import argparse
import importlib.util
import math
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

from kvq.tables import provenance, read_table, write_table

HERE = Path(__file__).resolve().parent
RELATIVE = 1e-6  # two machines' floating-point results differ by far less
ABSOLUTE = 1e-12
VOLATILE = ("versions", "date", "commit", "cpu")  # what a new recording may change


def load(folder, names=()):
    """The plot scripts of `folder`, as modules: all, or those of the given NAMEs.

    Raises ValueError for an unknown name and where there is no script.
    """
    modules = {}
    for path in sorted(folder.glob("plot_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules[module.NAME] = module
    if not modules:
        raise ValueError(f"no plot_*.py in {folder}")
    for name in names:
        if name not in modules:
            raise ValueError(f"no figure {name!r}; valid: {', '.join(modules)}")
    return [modules[name] for name in names or modules]


def header(module):
    """What the CSV says about itself: the finding, how to make it, where it ran."""
    finding = (module.__doc__ or "").strip().partition("\n")[0]
    command = f"python figures/make.py {module.NAME}"
    return {"figure": module.NAME, "finding": finding, **provenance(command)}


def same(a, b):
    """Equal; for floats, equal up to the two tolerances. NaN equals NaN."""
    if isinstance(a, float) or isinstance(b, float):
        both_nan = a != a and b != b
        return both_nan or math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return a == b


def differences(new, recorded):
    """Where two CSV files differ, one line each; an absent file differs."""
    if not recorded.exists():
        return [f"{recorded.name} is missing"]
    (rows, facts), (old_rows, old_facts) = read_table(new), read_table(recorded)
    found = [
        f"header {key!r}: {old_facts.get(key)!r} recorded, {facts.get(key)!r} now"
        for key in sorted({*facts, *old_facts} - {*VOLATILE})
        if facts.get(key) != old_facts.get(key)
    ]
    if len(rows) != len(old_rows):
        return [*found, f"{len(old_rows)} rows recorded, {len(rows)} now"]
    for i, (row, old) in enumerate(zip(rows, old_rows, strict=True)):
        found += [
            f"row {i}, {key}: {old.get(key)!r} recorded, {row.get(key)!r} now"
            for key in {**old, **row}
            if not _same_cell(row, old, key)
        ]
    return found


def _same_cell(row, old, key):
    try:
        return same(row[key], old[key])
    except (KeyError, TypeError):  # a new column, or a number that became a word
        return False


def compute(module, folder):
    """Compute a figure's data. Returns (path of the recorded CSV, differences, text).

    `text` is the new CSV.
    """
    recorded = folder / "data" / f"{module.NAME}.csv"
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / recorded.name
        write_table(new, module.data(), header(module))
        return recorded, differences(new, recorded), new.read_text(encoding="utf-8")


def make(folder, module):
    """Record a figure's data if it changed, and draw it. Returns a remark."""
    recorded, changed, text = compute(module, folder)
    if changed:
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(text, encoding="utf-8", newline="\n")
    module.draw(read_table(recorded)[0], folder / module.NAME)
    return "new data" if changed else "same data"


def check(folder, module):
    """A remark: how a figure's files differ from what its script gives."""
    _, changed, _ = compute(module, folder)
    pictures = [folder / f"{module.NAME}.{kind}" for kind in ("svg", "png")]
    changed += [f"{path.name} is missing" for path in pictures if not path.exists()]
    if not changed:
        return "same data"
    return "DRIFT\n" + "\n".join(f"    {line}" for line in changed[:10])


def run(folder, names, check_only):
    """Make (or check) the figures, one line each. Exit code 1 where one drifted."""
    matplotlib.use("Agg")  # no window, whatever the caller's settings
    drifted = False
    for module in load(folder, names):
        start = time.perf_counter()
        remark = (check if check_only else make)(folder, module)
        seconds = time.perf_counter() - start
        print(f"{module.NAME:<32} {seconds:6.1f} s  {remark}", flush=True)
        drifted |= remark.startswith("DRIFT")
    if drifted:
        print("run `make figures` and commit the result", file=sys.stderr)
    return int(drifted)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Compute and draw the figures.", prog="python figures/make.py"
    )
    parser.add_argument("names", nargs="*", help="figures (default: all)")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--folder", type=Path, default=HERE, help="where plot_*.py lie")
    options = parser.parse_args(argv)
    try:
        return run(options.folder, options.names, options.check)
    except ValueError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

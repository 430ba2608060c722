"""Record what the kernels cost, or compare the tables of kernels/README.md.

python -m kvq.kernels.budgets            compile, count, write *.csv and the tables
python -m kvq.kernels.budgets --check    exit with 1 where they are not these files
"""

import argparse
import sys

from kvq.kernels import budgets, report
from kvq.kernels.budgets import tensor_cores
from kvq.kernels.cases import versions
from kvq.kernels.launch import nvrtc
from kvq.tables import write_table


def rows(archs=nvrtc.ARCHITECTURES):
    """Every row that has a budget."""
    found = []
    for op, version in versions():
        bits = (
            [4]
            if version == "v1"
            else sorted({b for a in archs for b in budgets.BITS[a]})
        )
        for b in bits:
            wanted = [arch for arch in archs if b in budgets.BITS[arch]]
            found += report.rows(wanted, cases=[report.case_of(op, version, b)])
    return found


def record():
    header = {"nvrtc": nvrtc.version(), "command": "python -m kvq.kernels.budgets"}
    found = rows()
    for arch in nvrtc.ARCHITECTURES:
        own = [
            {**row, "instructions_per_byte": round(row["instructions_per_byte"], 2)}
            for row in found
            if row["arch"] == arch
        ]
        write_table(budgets.FOLDER / f"sm_{arch}.csv", own, header)
    tensor_cores.main()
    text = budgets.with_table(budgets.README.read_text(encoding="utf-8"))
    budgets.README.write_text(text, encoding="utf-8")


def check():
    text = budgets.README.read_text(encoding="utf-8")
    if budgets.with_table(text) != text:
        print("kernels/README.md is not what budgets/ says: run `make ptx`")
        return 1
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description="Record what the kernels cost.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if parser.parse_args(argv).check:
        return check()
    if reason := nvrtc.unavailable():
        print(f"kvq.kernels.budgets: {reason}", file=sys.stderr)
        return 2
    record()
    return 0


if __name__ == "__main__":
    sys.exit(main())

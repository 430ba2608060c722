"""Tables as files: rows as CSV, with a header that says where they come from."""

import csv
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np


def write_table(path, rows, header=None):
    """Write rows (dicts with the same keys) to `path` as CSV, in one step.

    Numbers are written so that `read_table` gives the same ones back. Cells hold int,
    float, text or None. The file appears complete or not at all.
    header : dict, written as `# key: value` lines above the column names.
    Raises ValueError for rows that differ in their keys, and for what a file of this
    kind cannot hold: no rows, other objects, text that would be read as a number.
    """
    path = Path(path)
    names = list(rows[0]) if rows else []
    if not names or not all(str(name).isidentifier() for name in names):
        raise ValueError(f"{path.name}: columns {names}; valid: names such as nmse")
    for i, row in enumerate(rows):
        if set(row) != set(names):
            raise ValueError(f"row {i} has columns {list(row)}, row 0 has {names}")
    cells = [[_to_text(name, row[name]) for name in names] for row in rows]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            for key, value in (header or {}).items():
                file.write(_header_line(key, value))
            csv.writer(file, lineterminator="\n").writerows([names, *cells])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_table(path):
    """(rows, header) of a file that `write_table` wrote; header values are text.

    Raises ValueError, naming the line, for a file that is not such a table.
    """
    path = Path(path)
    with path.open(encoding="utf-8", newline="") as file:
        try:
            lines = file.readlines()
        except UnicodeDecodeError:
            raise ValueError(f"{path.name}: not UTF-8 text") from None
    above = next((i for i, s in enumerate(lines) if not s.startswith("#")), len(lines))
    header = dict(
        _parse_header(f"{path.name}, line {i + 1}", line)
        for i, line in enumerate(lines[:above])
    )
    return _parse_rows(path.name, lines[above:], above), header


def _header_line(key, value):
    text = f"# {key}: {value}"
    if ":" in str(key) or len(text.splitlines()) != 1:
        raise ValueError(f"header {key!r}={value!r} is not one 'key: value' line")
    return text + "\n"


def _parse_header(where, line):
    key, colon, value = line[1:].strip().partition(":")
    if not colon:
        raise ValueError(f"{where}: expected '# key: value', not {line.strip()!r}")
    return key.strip(), value.strip()


def _parse_rows(name, lines, above):
    rows, names = [], None
    reader = csv.reader(lines, strict=True)
    try:
        for cells in reader:
            where = f"{name}, line {above + reader.line_num}"
            if names is None:
                names = cells
                if not all(names) or len(set(names)) < len(names):
                    raise ValueError(f"{where}: column names {names}, empty or twice")
            elif len(cells) != len(names):
                raise ValueError(f"{where}: {len(cells)} cells; expected {len(names)}")
            else:
                rows.append(dict(zip(names, map(_from_text, cells), strict=True)))
    except csv.Error as error:
        raise ValueError(f"{name}, line {above + reader.line_num}: {error}") from None
    if names is None:
        raise ValueError(f"{name}, line {above + 1}: no column names")
    return rows


def _to_text(name, value):
    value = value.item() if isinstance(value, np.generic) else value
    text = "" if value is None else str(value)
    back = _from_text(text)
    same = type(back) is type(value) and (back == value or back != back)
    if not same or any(c in text for c in "\r\n"):
        raise ValueError(f"{name}={value!r}; valid: int, float, one line of text, None")
    return text


def _from_text(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def provenance(command):
    """Where and when a table was made: a header for `write_table`.

    command : how to make it again (name no host and no folder of yours in it).
    Returns a dict of text: command, date, versions, cpu, and commit in a checkout.
    """
    import kvq

    versions = {
        "Python": platform.python_version(),
        "kvq": kvq.__version__,
        "NumPy": np.__version__,
    }
    facts = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": ", ".join(f"{name} {v}" for name, v in versions.items()),
        "cpu": _cpu_name(),
        "commit": _commit(Path(kvq.__file__).resolve().parents[1]),
    }
    return {key: value for key, value in facts.items() if value}


def _cpu_name():
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _commit(folder):
    """The commit of a checkout, "-dirty" where files differ from it; else ""."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    command += ["--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""Write this folder's PTX again, or compare.

python -m kvq.kernels.ptx            compile everything, write the texts and the index
python -m kvq.kernels.ptx --check    exit with 1 where a source or a text has changed

A check compares the hashes of all sources and texts, and compiles one text of each
kernel in each language again (--every: all of them, minutes).
"""

import argparse
import gzip
import hashlib
import json
import sys

from kvq.kernels import ptx
from kvq.kernels.launch import cache
from kvq.kernels.launch.compilers import COMPILERS, compile_ptx
from kvq.kernels.ptx.specializations import specializations

WHEELS = {"c": ("nvidia-cuda-nvrtc",), "numba": ("numba-cuda", "nvidia-nvvm")}


def compiler(language):
    """Its name and version here, such as "nvidia-cuda-nvrtc 13.5.37", or None."""
    if COMPILERS[language].unavailable():
        return None
    return " ".join(f"{wheel} {cache.wheel(wheel)}" for wheel in WHEELS[language])


def wanted():
    """{key: source, language, kernel, constants and file} of every text, in order."""
    found = {}
    for source, kernel, constants in specializations():
        for language in ptx.LANGUAGES:
            if ptx.source_hash(source, language) is None:
                continue  # what this language cannot express
            key = ptx.key(source, constants, language, kernel)
            found[key] = {
                "source": source,
                "language": language,
                "kernel": key[-1],
                "constants": constants,
                "file": _file(source, language, key[-1], constants),
            }
    return found


def _file(source, language, kernel, constants):
    settings = json.dumps(constants, sort_keys=True)
    stem = ".".join(filter(None, (source, kernel, _hash(settings)[:8])))
    return f"{language}/{stem}.ptx.gz"


def _hash(text):
    return hashlib.sha256(text.encode()).hexdigest()


def compiled(entry):
    """The PTX of an entry, compiled now."""
    what = (entry[name] for name in ("language", "source", "kernel", "constants"))
    return compile_ptx(*what)


def complete(entry, text):
    """An entry as index.json has it."""
    return entry | {
        "compiler": compiler(entry["language"]),
        "source_sha256": ptx.source_hash(entry["source"], entry["language"]),
        "ptx_sha256": _hash(text),
    }


# --- write ----------------------------------------------------------------------------
def write():
    """Every text and the index; what is no longer wanted goes."""
    for language, module in COMPILERS.items():
        if reason := module.unavailable():
            raise RuntimeError(f"cannot compile {language}: {reason}")
    texts = [(entry, compiled(entry)) for entry in wanted().values()]
    for path in ptx.FOLDER.rglob("*.ptx.gz"):
        path.unlink()
    for entry, text in texts:
        path = ptx.FOLDER / entry["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    index = json.dumps([complete(*pair) for pair in texts], indent=1)
    (ptx.FOLDER / "index.json").write_text(index + "\n", encoding="utf-8", newline="\n")
    size = sum(path.stat().st_size for path in ptx.FOLDER.rglob("*.ptx.gz"))
    print(f"{len(texts)} texts, {size / 1e6:.1f} MB")


# --- check ----------------------------------------------------------------------------
def differences(every=False):
    """What `write` would change, one line each.

    every : compile every text again, not only one of each kernel in each language.
    """
    entries, recorded = wanted(), ptx.index()
    for key in entries.keys() ^ recorded.keys():
        where = "is missing" if key in entries else "is no longer wanted"
        yield f"{(entries | recorded)[key]['file']} {where}"
    compiled_already = set()
    for key in entries.keys() & recorded.keys():
        entry = recorded[key]
        kernel = entry["source"], entry["language"], entry["kernel"]
        if what := difference(entry, every or kernel not in compiled_already):
            yield f"{entry['file']} {what}"
        compiled_already.add(kernel)


def difference(entry, compile_again=True):
    """None, or how one text differs from its source."""
    path = ptx.FOLDER / entry["file"]
    if not path.exists() or _hash(ptx.read(path)) != entry["ptx_sha256"]:
        return "is not what index.json says"
    if entry["source_sha256"] != ptx.source_hash(entry["source"], entry["language"]):
        return f"is older than the source of {entry['source']}"
    if not compile_again or entry["compiler"] != compiler(entry["language"]):
        return None  # another compiler gives another text
    if compiled(entry) != ptx.read(path):
        return f"is not what {entry['compiler']} gives"
    return None


def check(every=False):
    """Print the differences. Exit code 1 where there is one."""
    for language in ptx.LANGUAGES:
        made = {
            e["compiler"] for e in ptx.index().values() if e["language"] == language
        }
        for other in made - {compiler(language)}:
            print(f"{language}: made by {other}, which is not here: not compiled again")
    found = sorted(differences(every))
    for line in found[:20]:
        print(line)
    if found:
        print(f"{len(found)} differences: run `make ptx`", file=sys.stderr)
    return int(bool(found))


def main(argv=None):
    parser = argparse.ArgumentParser(description="The PTX in this folder.")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--every", action="store_true", help="compile all to compare")
    options = parser.parse_args(argv)
    if options.check:
        return check(options.every)
    try:
        write()
    except RuntimeError as error:
        print(f"kvq.kernels.ptx: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

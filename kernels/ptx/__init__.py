"""Compiled kernels that come with the project: NumPy alone can run them.

`find` gives the PTX of a kernel where this folder holds it. `specializations.py` says
which kernels are here, `python -m kvq.kernels.ptx` writes them again, `index.json`
says of each from which source and by which compiler it was made. A source that has
changed since then has no PTX here. `gunzip -c FILE` shows a text.
"""

import functools
import gzip
import hashlib
import json
from pathlib import Path

from kvq.kernels.launch.compilers import COMPILERS

FOLDER = Path(__file__).resolve().parent
KERNELS = FOLDER.parent
LANGUAGES = {"c": ".cu", "numba": ".py"}


def find(source, constants, language="c", kernel=None):
    """PTX text, or None where it is not here.

    source : a kernel's file without its suffix, "decode/v1_two_pass".
    constants : {name: int or str}, those that it was compiled with.
    language : "c" (all kernels of the source in one text) or "numba" (`kernel` alone).
    Raises ValueError for another language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language={language!r}; valid: {', '.join(LANGUAGES)}")
    entry = index().get(key(source, constants, language, kernel))
    if entry is None or entry["source_sha256"] != source_hash(source, language):
        return None
    return read(FOLDER / entry["file"])


def read(path):
    """The text of a .ptx.gz file."""
    return gzip.decompress(path.read_bytes()).decode()


@functools.cache
def index():
    """What is here: {key: entry of index.json}."""
    path = FOLDER / "index.json"
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    fields = ("source", "constants", "language", "kernel")
    return {key(*(entry[field] for field in fields)): entry for entry in entries}


def key(source, constants, language, kernel=None):
    """What tells one compiled kernel from another."""
    settings = tuple(sorted((name, str(v)) for name, v in constants.items()))
    return source, settings, language, kernel if language == "numba" else None


def source_hash(source, language):
    """SHA-256 of a source and of all that it includes, or None without one."""
    if not (KERNELS / f"{source}{LANGUAGES[language]}").is_file():
        return None
    text = COMPILERS[language].source_text(source)
    return hashlib.sha256(text.encode()).hexdigest()

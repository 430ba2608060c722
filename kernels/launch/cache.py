"""Compiled kernels are kept: in this process, and in the user's cache folder."""

import hashlib
import os
import sys
import tempfile
import zlib
from importlib import metadata
from pathlib import Path

MOST = 2000  # results in one folder
_results = {}


def kept(folder, files, facts, compute):
    """The bytes that `compute()` gives, computed once for the same files and facts.

    folder : its place in `cache_folder()`.
    files, facts : paths and strings, all that the result depends on.
    """
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    key = hashlib.sha256("\0".join([*facts, *texts]).encode()).hexdigest()
    if key not in _results:
        path = cache_folder() / folder / key
        data = _load(path)
        if data is None:
            data = compute()
            _store(path, data)
        _results[key] = data
    return _results[key]


def _load(path):
    try:
        return zlib.decompress(path.read_bytes())
    except (OSError, zlib.error):
        return None


def _store(path, data):
    """All of `data` in the file, or no such file: other processes read it, too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(zlib.compress(data))
        os.replace(temporary, path)
        _prune(path.parent)
    except OSError:
        pass  # a cache that cannot be written is slower, not wrong


def _prune(folder):
    """Of too many results, the older half goes."""
    names = os.listdir(folder)
    if len(names) > MOST:
        paths = sorted((folder / name for name in names), key=os.path.getmtime)
        for path in paths[: len(paths) // 2]:
            path.unlink(missing_ok=True)


def cache_folder():
    """The folder of this project in the user's cache; may be deleted at any time."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home()))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvq"


def wheel(name):
    """The installed version of a package, or "-"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "-"

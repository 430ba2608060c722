"""A GGUF file: metadata and tensors, checked before they are used.

The format is that of llama.cpp (ggml's docs/gguf.md); the package `gguf` reads it.
"""

import math
from pathlib import Path

import numpy as np

# Each piece of metadata that is read costs memory. A vocabulary of 262,144 words with
# scores and types takes about a million; a broken file could ask for any number.
MAX_PIECES = 2_000_000

_MISSING = object()


def _reader(path):
    """`gguf.GGUFReader`, but one that never reads past the end of the file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        pieces = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            self.data = np.asarray(self.data)  # views of a memmap are slow to make
            self.pieces += 1
            if self.pieces > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES:,} pieces of metadata")
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(f"ends after {len(self.data):,} of {end:,} bytes")
            return super()._get(offset, dtype, count, override_order)

    return Reader(path)


class GGUFFile:
    """An open file: `get` its metadata, read its tensors one at a time.

    path : a local file. Its tensors stay on disk until they are asked for.
    Raises OSError for a file that cannot be opened, ValueError, naming the file and
    the reason, for one that is not a complete GGUF file.
    """

    def __init__(self, path):
        self.path = Path(path)
        with self.path.open("rb"):
            pass  # a folder or a missing file: the system's own message
        try:
            self._file = _reader(self.path)
        except (
            ValueError,
            KeyError,
            IndexError,
            OverflowError,
            RecursionError,
            TypeError,
        ) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path}: not a complete GGUF file ({reason})") from None
        if self._file.byte_order != "I":
            raise self.error("its byte order is not this machine's")
        self._tensors = {t.name: t for t in self._file.tensors}

    def error(self, text):
        """A ValueError that names the file."""
        return ValueError(f"{self.path}: {text}")

    # --- metadata ---------------------------------------------------------------------
    def get(self, key, default=_MISSING):
        """The value of `key`: int, float, bool, str or a list of these.

        Raises ValueError for a missing key without a default.
        """
        field = self._file.fields.get(key)
        if field is None:
            if default is _MISSING:
                raise self.error(f"has no {key!r}")
            return default
        try:
            return field.contents()
        except (ValueError, IndexError, TypeError):
            raise self.error(f"{key!r} cannot be read") from None

    def integer(self, key, default=_MISSING):
        """The value of `key`, an integer in 1..2^31. Raises ValueError."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= 2**31:
            raise self.error(f"{key}={value!r}; valid: an integer in 1..2^31")
        return value

    def number(self, key, default=_MISSING):
        """The value of `key`, a finite number > 0. Raises ValueError."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(f"{key}={value!r}; valid: a finite number > 0")
        return float(value)

    # --- tensors ----------------------------------------------------------------------
    @property
    def names(self):
        """Names of the tensors: a set."""
        return set(self._tensors)

    def shape(self, name):
        """Shape of a tensor in NumPy's order: a matrix is (outputs, inputs)."""
        if name not in self._tensors:
            raise self.error(f"has no tensor {name!r}")
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name, shape):
        """A tensor as float32, dequantized. Raises ValueError unless it has `shape`."""
        import gguf

        if self.shape(name) != tuple(shape):
            raise self.error(f"{name} is {self.shape(name)}; expected {tuple(shape)}")
        stored = self._tensors[name]
        kind = stored.tensor_type
        try:
            with np.errstate(all="ignore"):  # what comes out is checked below
                x = gguf.dequantize(stored.data, kind)
        except (NotImplementedError, KeyError):
            raise self.error(
                f"{name} has type {kind.name}, which cannot be read; valid: F32, F16, "
                "BF16, Q4_0 ... Q8_0, Q2_K ... Q6_K and others of the package gguf"
            ) from None
        x = np.array(x, np.float32).reshape(shape)  # a copy: the file may be closed
        if not np.isfinite([x.min(), x.max()]).all():  # either carries a NaN
            raise self.error(f"{name} holds numbers that are not finite")
        return x


def open_gguf(path):
    """A GGUFFile: of a path, or the one given (opening a large one takes time)."""
    return path if isinstance(path, GGUFFile) else GGUFFile(path)

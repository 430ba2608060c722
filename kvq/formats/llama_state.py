"""llama.cpp sequence and session files: a whole quantized cache on disk.

    sequence  "ggsq" version 3 | tokens | memory
    session   "ggsn" version 10 | tokens | architecture | memory
    memory    streams; each: cells (position, sequence ids), then per layer all K rows,
              then per layer all V rows

A row is one token: all KV heads of a layer, one after the other, in a `ggml` format.
Everything is little-endian, without padding. Whether the cache was rotated
(`ggml.rotate`) is not recorded: a reader must be told.

Files are untrusted: every count is checked against the bytes that are left before
anything is allocated. Source: src/llama-context.cpp and src/llama-kv-cache.cpp of
llama.cpp 0c1e57098.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

from kvq.formats.ggml import FORMATS, TYPE_IDS

MAGIC = {b"qsgg": ("sequence", 3), b"nsgg": ("session", 10)}
_FORMAT_OF_ID = {i: FORMATS[f"ggml:{name}"] for name, i in TYPE_IDS.items()}


@dataclass
class Rows:
    """The rows of one layer and side: a format, and cells x row bytes."""

    format: object
    data: np.ndarray  # uint8 (cells, row_bytes)

    def numbers(self):
        """float32 (cells, embedding): what the rows stand for."""
        cells, row_bytes = self.data.shape
        width = row_bytes // self.format.block_bytes * self.format.block
        return self.format.decode(self.data.tobytes(), (cells, width))


@dataclass
class Stream:
    """Cells of one stream. seq_ids : per cell, the sequences it belongs to.

    transposed : V is stored channel by channel (only without flash attention).
    """

    positions: list[int] = field(default_factory=list)
    seq_ids: list[tuple[int, ...]] = field(default_factory=list)
    keys: list[Rows] = field(default_factory=list)
    values: list[Rows] = field(default_factory=list)
    transposed: bool = False


@dataclass
class State:
    """A sequence file (arch is None) or a session file."""

    tokens: list[int]
    streams: list[Stream]
    arch: str | None = None


# --- reading --------------------------------------------------------------------------
class _Reader:
    """Bytes with a position; refuses to promise more than is there."""

    def __init__(self, data):
        self.data, self.at = memoryview(data), 0

    def left(self):
        return len(self.data) - self.at

    def take(self, n, what):
        if n > self.left():
            raise ValueError(
                f"{what} at byte {self.at} needs {n} bytes, but {self.left()} are left"
            )
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code, what):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[
            0
        ]

    def count(self, size, what):
        """A u32 count of things of at least `size` bytes each."""
        n = self.number("I", what)
        if n * size > self.left():
            raise ValueError(
                f"{what} at byte {self.at - 4} is {n}, more than "
                f"{self.left()} bytes can hold"
            )
        return n

    def integers(self, n, what):
        return np.frombuffer(self.take(4 * n, what), "<i4").tolist()


def read(data):
    """The `State` in the bytes of a sequence or session file.

    Raises ValueError, one line that names the field and its position, for anything
    that is not such a file, ends early, goes on too long, or uses a type we do not
    know.
    """
    reader = _Reader(data)
    magic = bytes(reader.take(4, "magic"))
    if magic not in MAGIC:
        raise ValueError(
            f"magic {magic!r}; valid: {b'qsgg'!r} (sequence), {b'nsgg'!r} (session)"
        )
    kind, version = MAGIC[magic]
    found = reader.number("I", "version")
    if found != version:
        raise ValueError(f"{kind} file of version {found}; valid: {version}")
    tokens = reader.integers(reader.count(4, "token count"), "tokens")
    arch = _read_arch(reader) if kind == "session" else None
    streams = [_read_stream(reader) for _ in range(reader.count(4, "stream count"))]
    if reader.left():
        raise ValueError(f"{reader.left()} bytes after the end, at byte {reader.at}")
    return State(tokens, streams, arch)


def _read_arch(reader):
    name = bytes(reader.take(reader.count(1, "architecture length"), "architecture"))
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise ValueError(f"architecture {name[:32]!r} is not ASCII") from None


def _read_stream(reader):
    stream = Stream()
    cells = reader.count(8, "cell count")
    if cells == 0:
        return stream
    for _ in range(cells):
        stream.positions.append(reader.number("i", "position"))
        ids = reader.count(4, "number of sequence ids")
        stream.seq_ids.append(tuple(reader.integers(ids, "sequence ids")))
    flag = reader.number("I", "v_trans")
    if flag not in (0, 1):
        raise ValueError(f"v_trans is {flag}; valid: 0, 1")
    stream.transposed = bool(flag)
    layers = reader.count(12, "layer count")
    stream.keys = [_read_rows(reader, cells, "K") for _ in range(layers)]
    read_values = _read_channels if stream.transposed else _read_rows
    stream.values = [read_values(reader, cells, "V") for _ in range(layers)]
    return stream


def _read_format(reader, side):
    kind = reader.number("i", f"{side} type")
    if kind not in _FORMAT_OF_ID:
        raise ValueError(
            f"{side} type {kind}; valid: "
            + ", ".join(f"{i} ({f.name})" for i, f in sorted(_FORMAT_OF_ID.items()))
        )
    return _FORMAT_OF_ID[kind]


def _read_rows(reader, cells, side):
    kind = _read_format(reader, side)
    size = reader.number("Q", f"{side} row size")
    if size == 0 or size % kind.block_bytes:
        raise ValueError(
            f"{side} row size {size}; valid: multiples of {kind.block_bytes} "
            f"bytes for {kind.name}"
        )
    data = np.frombuffer(reader.take(cells * size, f"{side} rows"), np.uint8)
    return Rows(kind, data.reshape(cells, size))


def _read_channels(reader, cells, side):
    """V stored channel by channel, as rows per cell like everything else."""
    kind = _read_format(reader, side)
    size, width = reader.number("I", "element size"), reader.number("I", "V width")
    if kind.block != 1 or size != kind.block_bytes:
        raise ValueError(f"transposed V of {size}-byte {kind.name} elements")
    data = np.frombuffer(reader.take(width * cells * size, "V channels"), np.uint8)
    rows = data.reshape(width, cells, size).swapaxes(0, 1)
    return Rows(kind, np.ascontiguousarray(rows).reshape(cells, width * size))


# --- writing --------------------------------------------------------------------------
def write(state):
    """The bytes of a `State`: the exact inverse of `read`.

    Raises ValueError for a state whose parts do not fit together, or a number that
    does not fit its field.
    """
    try:
        return b"".join(_parts(state))
    except struct.error as error:
        raise ValueError(f"a number does not fit its field: {error}") from None


def _parts(state):
    magic = b"qsgg" if state.arch is None else b"nsgg"
    yield magic + struct.pack("<I", MAGIC[magic][1]) + _integers(state.tokens)
    if state.arch is not None:
        yield struct.pack("<I", len(state.arch)) + state.arch.encode("ascii")
    yield struct.pack("<I", len(state.streams))
    for stream in state.streams:
        yield from _stream_parts(stream)


def _integers(values):
    return struct.pack(f"<I{len(values)}i", len(values), *values)


def _stream_parts(stream):
    cells = len(stream.positions)
    yield struct.pack("<I", cells)
    if cells == 0:
        return
    _check_stream(stream, cells)
    for position, ids in zip(stream.positions, stream.seq_ids, strict=True):
        yield struct.pack("<i", position) + _integers(ids)
    yield struct.pack("<II", stream.transposed, len(stream.keys))
    for rows in stream.keys:
        yield from _row_parts(rows)
    for rows in stream.values:
        yield from (_channel_parts if stream.transposed else _row_parts)(rows)


def _check_stream(stream, cells):
    sides = [*stream.keys, *stream.values]
    if len(stream.seq_ids) != cells or len(stream.keys) != len(stream.values):
        raise ValueError("positions, sequence ids, keys and values differ in number")
    if any(len(rows.data) != cells for rows in sides):
        raise ValueError(f"a layer does not hold one row for each of {cells} cells")
    for rows in stream.values if stream.transposed else ():
        if rows.format.block != 1:
            raise ValueError(
                f"transposed V of {rows.format.name}; valid: f32, f16, bf16"
            )


def _type_id(kind):
    name = kind.name.partition(":")[2]
    if name not in TYPE_IDS:
        raise ValueError(f"cache type {name!r}; valid: {', '.join(TYPE_IDS)}")
    return TYPE_IDS[name]


def _row_parts(rows):
    yield struct.pack("<iQ", _type_id(rows.format), rows.data.shape[1])
    yield rows.data.tobytes()


def _channel_parts(rows):
    size = rows.format.block_bytes
    cells, row_bytes = rows.data.shape
    yield struct.pack("<iII", _type_id(rows.format), size, row_bytes // size)
    yield rows.data.reshape(cells, -1, size).swapaxes(0, 1).tobytes()


def encode_rows(name, x):
    """x (H_kv, T, D) as the `Rows` of one layer: heads side by side, one row a token.

    name : a ggml cache type, such as "q4_0". Raises ValueError for another.
    """
    if name not in TYPE_IDS:
        raise ValueError(f"cache type {name!r}; valid: {', '.join(TYPE_IDS)}")
    kind = FORMATS[f"ggml:{name}"]
    rows = np.asarray(x).swapaxes(0, 1).reshape(np.shape(x)[1], -1)
    data = np.frombuffer(kind.encode(rows), np.uint8)
    return Rows(kind, data.reshape(len(rows), -1))


def decode_rows(rows, kv_heads):
    """float32 (H_kv, T, D): the inverse of `encode_rows`."""
    x = rows.numbers()
    return x.reshape(len(x), kv_heads, -1).swapaxes(0, 1)

"""`KVCache`: a growing cache, stored by a policy.

Each sequence is laid out as

    [ sinks, full precision | quantized blocks | residual window, full precision ]
      S tokens                multiple of block   R .. R + block - 1 tokens

New tokens enter the window; the oldest leave it in whole blocks, once, and are never
quantized again. Where a token is depends on the number of tokens alone
(`Policy.split`), so feeding 200 tokens at once or one by one stores the same bytes.

Stored arrays are never changed in place. A call that fails changes nothing, and
sequences that were reordered share their history.
"""

from dataclasses import dataclass, replace

import numpy as np

from kvq.attention import decode, visible
from kvq.dtypes import as_float_array, cast
from kvq.packing import pack
from kvq.scheme import Scheme, policy
from kvq.tensor import QuantizedTensor, concatenate, quantize

# Small blocks are merged as they come, like the digits of a binary counter, up to
# this many tokens: a token is copied at most log2(CHUNK) times, and never all of them.
CHUNK = 1024

PARTS = ("sinks", "quantized", "window")
LAYOUTS = ("chunks", "blocks")


class Chunks:
    """The layout of the reference: packed rows, in QuantizedTensors."""

    def check_head_dim(self, D):
        """Any D can be stored."""

    def append(self, chunks, x, scheme):
        """The chunks with the tokens x (H, t, D), quantized, behind them."""
        return _merge_small((*chunks, quantize(x, scheme)))

    def convert(self, chunks):
        """Chunks of any layout, in this one."""
        return tuple(
            QuantizedTensor(
                c.scheme, c.shape, pack(c.unpack(), c.scheme.bits), c.scale, c.zero
            )
            for c in chunks
        )


@dataclass(frozen=True, eq=False)
class Stream:
    """The keys, or the values, of one sequence.

    sinks, window : (H, S, D) and (H, W, D) in the dtype they came in.
    chunks : QuantizedTensors (1 head axis of H), consecutive tokens.
    layout : how chunks grow, `Chunks` or one of a backend.
    """

    scheme: Scheme
    sinks: np.ndarray
    chunks: tuple[QuantizedTensor, ...]
    window: np.ndarray
    dropped: int = 0  # quantized tokens that a sliding window has given up
    layout: object = Chunks()

    @property
    def lengths(self):
        """(sinks, quantized, window) in tokens."""
        quantized = sum(c.tokens for c in self.chunks)
        return self.sinks.shape[-2], quantized, self.window.shape[-2]

    @property
    def arrays(self):
        """Every array that is stored."""
        return [self.sinks, *(a for c in self.chunks for a in c.arrays), self.window]

    def append(self, x, split):
        """With the tokens x (H, t, D), laid out as `split(T)` says."""
        window = np.concatenate([self.window, x.astype(self.window.dtype)], axis=-2)
        now = self.lengths
        sinks, quantized, _ = split(sum(now) + self.dropped + x.shape[-2])
        # A crop may have left fewer sinks, or more quantized tokens, than split says.
        fill = sinks - now[0]
        flush = max(quantized - self.dropped - now[1], 0)
        chunks = self.chunks
        if flush:
            chunks = self.layout.append(
                chunks, window[:, fill : fill + flush], self.scheme
            )
        return replace(
            self,
            sinks=np.concatenate([self.sinks, window[:, :fill]], axis=-2),
            chunks=chunks,
            window=window[:, fill + flush :].copy(),  # a view would keep it all alive
        )

    def slide(self, W, block):
        """Without the blocks that no later query sees through a window of W tokens."""
        T = sum(self.lengths) + self.dropped
        unseen = max(T - self.sinks.shape[-2] - (W - 1), 0) // block * block
        chunks = _drop_chunks(self.chunks, unseen - self.dropped)
        return replace(self, chunks=chunks, dropped=max(unseen, self.dropped))

    def crop(self, tokens, block):
        """The first `tokens` tokens; a block that is cut returns to the window.

        Its tokens come back as the values they were stored as: what the block was
        quantized from is gone.
        """
        sinks, quantized, _ = self.lengths
        whole = min(max(tokens - sinks, 0), quantized) // block * block
        start = sinks + whole
        return replace(
            self,
            sinks=self.sinks[:, :tokens].copy(),
            chunks=_crop_chunks(self.chunks, whole),
            window=self.read(start, max(tokens, start), self.window.dtype),
        )

    def read(self, start, stop, dtype):
        """The tokens start..stop-1 as attention sees them: (H, stop - start, D)."""
        parts = [np.empty_like(self.window[:, :0], dtype)]
        offset = 0
        for piece in (self.sinks, *self.chunks, self.window):
            n = piece.shape[-2]
            a, b = max(start - offset, 0), min(stop - offset, n)
            if a < b and isinstance(piece, np.ndarray):
                parts.append(piece[:, a:b].astype(dtype, copy=False))
            elif a < b:
                parts.append(cast(piece.dequantize(a, b), dtype))
            offset += n
        return np.concatenate(parts, axis=-2)


def _window_dtype(x):
    """Full precision is the dtype that came in; float64 is kept as float32."""
    return np.dtype(np.float32) if x.dtype == np.float64 else x.dtype


def _merge_small(chunks):
    """Merge the newest chunk into its neighbour while that one is not larger."""
    *rest, last = chunks
    while rest and rest[-1].tokens <= last.tokens <= CHUNK - rest[-1].tokens:
        last = concatenate([rest.pop(), last])
    return (*rest, last)


def _crop_chunks(chunks, tokens):
    kept = []
    for chunk in chunks:
        if tokens > 0:
            kept.append(chunk if chunk.tokens <= tokens else chunk.crop(tokens))
        tokens -= chunk.tokens
    return tuple(kept)


def _drop_chunks(chunks, tokens):
    kept = []
    for chunk in chunks:
        if chunk.tokens > tokens:
            kept.append(chunk.drop(tokens) if tokens > 0 else chunk)
        tokens -= chunk.tokens
    return tuple(kept)


class KVCache:
    """The keys and values of a batch of sequences, stored by a policy.

    policy : a `Policy` or the name of one in `PRESETS`.
    value_dim : width of the values in a latent cache (a policy with value=None).
    sliding_window : W; a query sees the newest W tokens (itself included) and the
        sinks. Blocks that no later query sees are given up at the next `append`.
        None: every token is kept. W must be larger than the policy's residual.
    layout : where quantized tokens lie. "chunks": packed rows, the reference's.
        "blocks": as the compiled decode of a CPU reads them (`kernels/cpu/blocks.py`);
        `attend(q, backend="auto")` then reads them where they are.

    Raises ValueError for an unknown policy, one whose groups span all tokens, a
    value_dim or sliding_window that does not fit, or a layout that cannot hold it.
    """

    def __init__(
        self, policy_or_name, value_dim=None, sliding_window=None, layout="chunks"
    ):
        self.policy = policy(policy_or_name)
        self.block = self.policy.block
        if (self.policy.value is None) != (value_dim is not None):
            raise ValueError(
                f"value_dim={value_dim!r} with value={self.policy.value!r}; a latent "
                "cache (value=None) needs value_dim, another has none"
            )
        if value_dim is not None and (type(value_dim) is not int or value_dim < 1):
            raise ValueError(f"value_dim={value_dim!r}; valid: an integer >= 1")
        self.value_dim = value_dim
        W, R = sliding_window, self.policy.residual
        if W is not None and (type(W) is not int or W <= R):
            raise ValueError(
                f"sliding_window={W!r}; valid: an integer > {R}, the policy's "
                "residual, or None"
            )
        self.sliding_window = W
        self.layout = layout
        self._layouts = self._layouts_of_sides(layout)
        self.rows = []  # per sequence: (keys,) or (keys, values), each a Stream

    def _layouts_of_sides(self, name):
        if name not in LAYOUTS:
            raise ValueError(f"layout={name!r}; valid: {', '.join(LAYOUTS)}")
        if name == "chunks":
            return [Chunks()] * len(self.policy.schemes)
        if self.sliding_window is not None:
            W = self.sliding_window
            raise ValueError(f"layout='blocks' with sliding_window={W}; valid: None")
        from kvq.kernels.cpu.blocks import layouts

        return layouts(self.policy)

    def with_layout(self, layout):
        """A cache of the same tokens, codes and scales in another layout.

        Raises ValueError for a layout that is unknown or cannot hold them.
        """
        other = KVCache(self.policy, self.value_dim, self.sliding_window, layout)
        for row in self.rows:
            streams = []
            for stream, kind in zip(row, other._layouts, strict=True):
                kind.check_head_dim(stream.window.shape[-1])
                chunks = kind.convert(stream.chunks)
                streams.append(replace(stream, chunks=chunks, layout=kind))
            other.rows.append(tuple(streams))
        return other

    # --- what is there ----------------------------------------------------------------
    @property
    def lengths(self):
        """Tokens stored of each sequence: a list of B integers."""
        return [sum(row[0].lengths) for row in self.rows]

    def __len__(self):
        """Tokens stored of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def nbytes(self):
        """Bytes of every array that is stored; shared history counts once."""
        arrays = {id(a): a for row in self.rows for s in row for a in s.arrays}
        return sum(a.nbytes for a in arrays.values())

    def report(self):
        """What is really stored, per sequence: tokens and bytes of each part."""
        return [
            {
                **dict(zip(PARTS, row[0].lengths, strict=True)),
                "full_precision_bytes": sum(
                    s.sinks.nbytes + s.window.nbytes for s in row
                ),
                "quantized_bytes": sum(c.nbytes for s in row for c in s.chunks),
            }
            for row in self.rows
        ]

    def keys(self, row=0):
        """The stored keys of a sequence, (H_kv, T, D) in the dtype they came in."""
        return self._read(row, 0, self.lengths[row])[0]

    def values(self, row=0):
        """The stored values of a sequence, (H_kv, T, D_v), likewise."""
        return self._read(row, 0, self.lengths[row])[1]

    def _read(self, row, start, stop, dtype=None):
        parts = [
            stream.read(start, stop, dtype or stream.window.dtype)
            for stream in self.rows[row]
        ]
        if self.policy.value is None:  # latent: values are columns of the keys
            parts.append(parts[0][..., : self.value_dim])
        return parts

    # --- growing ----------------------------------------------------------------------
    def append(self, k, v=None, mask=None):
        """Add tokens to every sequence.

        k : (B, H_kv, t, D) or, for a single sequence, (H_kv, t, D); float16, bfloat16,
            float32 or float64 (kept as float32). v : (..., D_v); absent for a latent
            cache. The first call fixes B, the shapes and the window's dtype.
        mask : bool (B, t) or (t,), False for padding, which is not stored.
        Raises TypeError or ValueError and changes nothing.
        """
        tensors = self._check_tensors(k, v)
        B, _, t, _ = tensors[0].shape
        mask = np.ones((B, t), bool) if mask is None else np.asarray(mask)
        if mask.shape != (B, t) and (B, *mask.shape) != (1, t):
            raise ValueError(f"mask {mask.shape}; expected (B, t) = {(B, t)}")
        if mask.dtype != bool:
            raise TypeError(f"mask has dtype {mask.dtype}; expected bool")
        rows = self.rows or [self._new_row(tensors)] * B
        mask = mask.reshape(B, t)
        if self.sliding_window is not None:
            W = self.sliding_window
            rows = [tuple(s.slide(W, self.block) for s in row) for row in rows]
        self.rows = [
            tuple(
                stream.append(x[b][:, mask[b]], self.policy.split)
                for stream, x in zip(row, tensors, strict=True)
            )
            for b, row in enumerate(rows)
        ]

    def _check_tensors(self, k, v):
        if (v is None) != (self.policy.value is None):
            expected = "no values" if self.policy.value is None else "keys and values"
            raise ValueError(f"this cache takes {expected}")
        tensors = [as_float_array(k, "k")]
        if v is not None:
            tensors.append(as_float_array(v, "v"))
        ndim, leading = tensors[0].ndim, {x.shape[:-1] for x in tensors}
        if ndim not in (3, 4) or len(leading) > 1 or 0 in tensors[0].shape[:-2]:
            raise ValueError(
                f"shapes {[x.shape for x in tensors]}; expected ([B,] H_kv, t, D), "
                "alike for keys and values but in D"
            )
        if ndim == 3:
            tensors = [x[None] for x in tensors]
        widths = [x.shape[-1] for x in tensors]
        for D, scheme in zip(widths, self.policy.schemes, strict=True):
            scheme.check_head_dim(D)
        if self.value_dim is not None and self.value_dim > widths[0]:
            raise ValueError(
                f"value_dim={self.value_dim}; valid: 1..{widths[0]}, the key's width"
            )
        self._check_against_rows(tensors)
        return tensors

    def _check_against_rows(self, tensors):
        if not self.rows:
            return
        for x, stream in zip(tensors, self.rows[0], strict=True):
            H, _, D = stream.window.shape
            if (len(x), x.shape[1], x.shape[3]) != (len(self.rows), H, D):
                raise ValueError(
                    f"shape {x.shape}; this cache holds (B, H, t, D) = "
                    f"({len(self.rows)}, {H}, t, {D})"
                )
            if _window_dtype(x) != stream.window.dtype:
                raise TypeError(
                    f"dtype {x.dtype}; this cache holds {stream.window.dtype}"
                )

    def _new_row(self, tensors):
        row = []
        for x, scheme, layout in zip(
            tensors, self.policy.schemes, self._layouts, strict=True
        ):
            H, D = x.shape[1], x.shape[3]
            layout.check_head_dim(D)
            empty = np.empty((H, 0, D), _window_dtype(x))
            row.append(Stream(scheme, empty, (), empty, layout=layout))
        return tuple(row)

    # --- shrinking and rearranging ----------------------------------------------------
    def crop(self, tokens):
        """Keep the first `tokens` tokens: one number, or one per sequence.

        Exact as long as the tokens given up are in the window. A block that is cut
        goes back to the window as the values it was stored as, so what `keys()`
        gives does not change.
        """
        counts = [tokens] * len(self.rows) if np.ndim(tokens) == 0 else list(tokens)
        if len(counts) != len(self.rows):
            raise ValueError(f"{len(counts)} lengths for {len(self.rows)} sequences")
        for n, T in zip(counts, self.lengths, strict=True):
            integer = isinstance(n, (int, np.integer)) and not isinstance(n, bool)
            if not integer or not 0 <= n <= T:
                raise ValueError(f"cannot crop {T} tokens to {n!r}; valid: 0..{T}")
        self.rows = [
            tuple(stream.crop(int(n), self.block) for stream in row)
            for n, row in zip(counts, self.rows, strict=True)
        ]

    def select(self, indices):
        """Keep these sequences, in this order; an index may repeat (beam search)."""
        indices = np.asarray(indices).reshape(-1)
        if indices.size and indices.dtype.kind not in "iu":
            raise TypeError(f"indices have dtype {indices.dtype}; expected integers")
        bad = indices[(indices < 0) | (indices >= len(self.rows))]
        if bad.size:
            raise ValueError(f"no sequence {bad[0]}; valid: 0..{len(self.rows) - 1}")
        self.rows = [self.rows[i] for i in indices]

    def reorder(self, indices):
        """`select` that keeps the number of sequences, as beam search does."""
        if len(indices) != len(self.rows):
            raise ValueError(
                f"{len(indices)} indices for {len(self.rows)} sequences; "
                "use select to change their number"
            )
        self.select(indices)

    # --- attention --------------------------------------------------------------------
    def tiles(self, row=0, tile=256):
        """(k, v) of consecutive tokens, float32, dequantized `tile` tokens at a time.

        tile=None : everything at once.
        """
        T = self.lengths[row]
        for start in range(0, T, tile or max(T, 1)):
            yield self._read(row, start, min(start + (tile or T), T), np.float32)

    def attend(self, q, *, tile=256, mask=None, backend=None, **options):
        """Attention of q over the cache; the queries are the newest tokens.

        q : (B, H_q, T_q, D), or (H_q, T_q, D) for a single sequence.
        tile : tokens dequantized at a time; None dequantizes the whole cache first.
        mask : bool, True = see, over stored tokens; (T,) or broadcastable to
            (B, H_q, T_q, T) with T = len(cache).
        backend : None is this reference, in float64. "auto" or the name of a backend of
            `kernels/`: its result, in float32; it has no `tile`, and says so if it
            cannot do this policy.
        options : scale, causal (True), softcap, sink_logits, as `attention.decode`.
        Returns float64 (..., H_q, T_q, D_v). A sequence without tokens gives zeros.
        """
        if backend is not None:
            from kvq.kernels import backend as find

            options |= {} if mask is None else {"mask": mask}
            return find(backend, "decode", self.policy).decode(q, self, **options)
        q = as_float_array(q, "q")
        batched = q[None] if q.ndim == 3 else q
        if batched.ndim != 4 or not len(batched) == len(self.rows) > 0:
            raise ValueError(
                f"q {q.shape}; expected (B, H_q, T_q, D) with B = {len(self.rows)} "
                "sequences (append first)"
            )
        if mask is not None:
            shape = (*batched.shape[:-1], len(self))
            mask = np.asarray(mask)
            mask = mask[None] if mask.ndim == 3 and q.ndim == 3 else mask
            mask = visible(shape, mask=mask)
        if tile is not None and (type(tile) is not int or tile < 1):
            raise ValueError(f"tile={tile!r}; valid: an integer >= 1 or None")
        out = np.stack(
            [
                self._attend_row(b, batched[b], tile, mask, options)
                for b in range(len(self.rows))
            ]
        )
        return out[0] if q.ndim == 3 else out

    def _recent(self, b, T_q):
        """Which stored tokens the newest T_q queries see: the sinks and W others."""
        sinks, T = self.rows[b][0].lengths[0], self.lengths[b]
        token, query = np.arange(T), np.arange(T - T_q, T)[:, None]
        return (token < sinks) | (query - token < self.sliding_window)

    def _attend_row(self, b, q, tile, mask, options):
        T = self.lengths[b]
        D_v = self.value_dim or self.rows[b][-1].window.shape[-1]
        if mask is not None:
            mask = mask[b, ..., :T]
        if self.sliding_window is not None:
            recent = self._recent(b, q.shape[-2])
            mask = np.broadcast_to(recent, (*q.shape[:-1], T)) & (
                True if mask is None else mask
            )
        return decode(q, self.tiles(b, tile), T, D_v, mask=mask, **options).out

r"""Two families of decoders, Llama and Gemma 3, in NumPy float32.

A decoder turns token ids into the hidden state that predicts the next one:

    x = E[tokens]
    x = x + attention(norm(x)),   x = x + feed_forward(norm(x)),     in every layer
    logits = norm(x) E^T

Attention goes through one `kvq.KVCache` per layer, so every key and value that a query
sees was stored by a policy and read back. Names of weights are those of GGUF files; a
matrix is (outputs, inputs) and maps rows, y = x W^T.
"""

import math
from dataclasses import dataclass

import numpy as np

from kvq.cache import KVCache
from kvq.dtypes import cast
from kvq.layers import LayerPolicies
from kvq.model.attend import attend, tokens_seen
from kvq.model.gguf_file import open_gguf
from kvq.scheme import policy as find_policy
from kvq.transforms import rope

ARCHITECTURES = ("llama", "gemma3")
CHUNK = 256  # tokens that run through a layer together


# --- the equations --------------------------------------------------------------------
def rms_norm(x, w, eps):
    r"""y = x / sqrt(mean(x^2) + eps) * w, over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * w


def linear(x, W):
    """y = x W^T for rows x (t, inputs), W (outputs, inputs)."""
    return x @ W.T


def silu(a):
    """a * sigmoid(a) = a * (1 + tanh(a / 2)) / 2, which cannot overflow."""
    return a * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * a)))


def gelu(a):
    r"""a/2 * (1 + tanh(sqrt(2/pi) * (a + 0.044715 a^3))), the tanh form of GELU."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (a + np.float32(0.044715) * a**3)
    return np.float32(0.5) * a * (1 + np.tanh(inner))


def feed_forward(x, gate, up, down, activation):
    """down(activation(gate x) * up x): SwiGLU with `silu`, GeGLU with `gelu`."""
    return linear(activation(linear(x, gate)) * linear(x, up), down)


def split_heads(x, heads):
    """(t, heads * D) -> (heads, t, D)."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def merge_heads(x):
    """(heads, t, D) -> (t, heads * D)."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def half_split(W, heads):
    """Rows of a query or key matrix, from pairs (2i, 2i + 1) to pairs (i, i + D/2).

    GGUF files of the Llama family interleave the two channels that RoPE rotates
    together; `kvq.transforms.rope` and everything else here keeps them half a head
    apart.
    """
    rows = W.reshape(heads, -1, 2, W.shape[-1])
    return rows.swapaxes(1, 2).reshape(W.shape)


# --- what a file says about its model -------------------------------------------------
@dataclass(frozen=True)
class Config:
    """The numbers that shape a model.

    rope_bases, windows : one per layer. A window of W tokens makes a layer sliding;
        None: it sees everything.
    """

    architecture: str
    layers: int
    width: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    rope_bases: tuple[float, ...]
    windows: tuple[int | None, ...]

    @property
    def gemma(self):
        """Gemma 3: norms of q and k, norms after each part, GeGLU, a scaled E."""
        return self.architecture == "gemma3"


def read_config(file):
    """The Config in a GGUFFile's metadata. Raises ValueError for what is unsupported.

    Sources: llama.cpp's conversion of both families (rows, names, keys); for Gemma 3,
    five sliding layers with RoPE base 10,000 before each full one (arXiv 2503.19786).
    """
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        valid = ", ".join(ARCHITECTURES)
        raise file.error(f"unsupported architecture {name!r}; valid: {valid}")
    layers = file.integer(f"{name}.block_count")
    if layers > len(file.names):
        raise file.error(f"{name}.block_count={layers}; the file has fewer tensors")
    scaling = file.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none":
        raise file.error(f"unsupported RoPE scaling {scaling!r}; valid: none")
    width = file.integer(f"{name}.embedding_length")
    q_heads = file.integer(f"{name}.attention.head_count")
    head_dim = file.integer(f"{name}.attention.key_length", max(width // q_heads, 1))
    base = file.number(f"{name}.rope.freq_base", 10000.0)
    sliding = [name == "gemma3" and i % 6 < 5 for i in range(layers)]
    window = file.integer(f"{name}.attention.sliding_window") if any(sliding) else None
    config = Config(
        architecture=name,
        layers=layers,
        width=width,
        hidden=file.integer(f"{name}.feed_forward_length"),
        q_heads=q_heads,
        kv_heads=file.integer(f"{name}.attention.head_count_kv", q_heads),
        head_dim=head_dim,
        vocab=file.shape("token_embd.weight")[0],
        context=file.integer(f"{name}.context_length"),
        eps=file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_bases=tuple(10000.0 if s else base for s in sliding),
        windows=tuple(window if s else None for s in sliding),
    )
    _check_heads(file, config)
    return config


def _check_heads(file, c):
    D, rotated = c.head_dim, f"{c.architecture}.rope.dimension_count"
    if c.q_heads % c.kv_heads:
        raise file.error(f"{c.q_heads} query heads cannot share {c.kv_heads} KV heads")
    if D % 2 or file.integer(rotated, D) != D:
        raise file.error(
            f"head_dim={D}, {rotated}={file.get(rotated, D)}; valid: even and equal"
        )


def weight_shapes(c):
    """{name in a layer: shape} of every weight of a layer."""
    Q, KV = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "attn_norm": (c.width,),
        "attn_q": (Q, c.width),
        "attn_k": (KV, c.width),
        "attn_v": (KV, c.width),
        "attn_output": (c.width, Q),
        "ffn_norm": (c.width,),
        "ffn_gate": (c.hidden, c.width),
        "ffn_up": (c.hidden, c.width),
        "ffn_down": (c.width, c.hidden),
    }
    if c.gemma:  # GGUF files hold these norms, and Gemma's others, as 1 + w
        shapes |= {"attn_q_norm": (c.head_dim,), "attn_k_norm": (c.head_dim,)}
        shapes |= {"post_attention_norm": (c.width,), "post_ffw_norm": (c.width,)}
    return shapes


# --- the model ------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Heads:
    """One layer's tensors of some tokens: (heads, t, D), float32.

    q, k : after RoPE. k_before_rope : before it. v : values.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_before_rope: np.ndarray


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model: `forward` for hidden states, `logits`, `generate`.

    embedding, head : (vocab, width); the same array where they are tied.
    layers : one dict of weights per layer. norm : (width,), before the head.
    """

    config: Config
    embedding: np.ndarray
    layers: list
    norm: np.ndarray
    head: np.ndarray

    def caches(self, policy):
        """An empty KVCache per layer.

        policy : a Policy or a preset's name for all layers, a list of one for each,
            or `kvq.layers.LayerPolicies`.
        A sliding layer's cache gives up the blocks that no later query sees. (Where a
        policy's residual window is no smaller than the layer's, it keeps all tokens.)
        Raises ValueError for what does not fit the number of layers.
        """
        L = self.config.layers
        if isinstance(policy, LayerPolicies):
            policies = policy.all(L)
        elif isinstance(policy, list | tuple):
            policies = list(policy)
        else:
            policies = [policy] * L
        if len(policies) != L:
            raise ValueError(f"{len(policies)} policies; valid: one, or {L} (layers)")
        return [
            self._cache(find_policy(p), W)
            for p, W in zip(policies, self.config.windows, strict=True)
        ]

    def _cache(self, policy, window):
        slides = window is not None and window > policy.residual
        return KVCache(policy, sliding_window=window if slides else None)

    def forward(self, tokens, caches, kv_dtype="float32", record=None):
        """Run tokens through the model, after those that the caches hold.

        tokens : t token ids. caches : as `caches` makes them; they grow by t tokens.
        kv_dtype : what keys and values are rounded to before they enter the cache;
            an inference engine hands over float16 or bfloat16.
        record : called as record(layer, heads) with each layer's `Heads`, once per
            CHUNK of tokens.
        Returns the normalized hidden states, float32 (t, width).
        Raises ValueError for ids outside the vocabulary or too many tokens.
        """
        tokens = self._check_tokens(tokens, tokens_seen(caches[0]))
        x = self.embed(tokens)
        for i, cache in enumerate(caches):
            x = self.layer(i, x, cache, kv_dtype, record)
        return self.last_norm(x)

    def _check_tokens(self, tokens, before):
        tokens, c = np.asarray(tokens), self.config
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
            raise ValueError(
                f"tokens {tokens.shape} of {tokens.dtype}; expected t >= 1 integers"
            )
        bad = tokens[(tokens < 0) | (tokens >= c.vocab)]
        if bad.size:
            raise ValueError(f"token id {bad[0]}; valid: 0..{c.vocab - 1}")
        if before + len(tokens) > c.context:
            raise ValueError(
                f"{before + len(tokens)} tokens; the model was made for {c.context}"
            )
        return tokens

    def embed(self, tokens):
        """The rows of E; Gemma multiplies them by sqrt(width)."""
        x = self.embedding[tokens]
        return x * np.float32(math.sqrt(self.config.width)) if self.config.gemma else x

    def layer(self, i, x, cache, kv_dtype="float32", record=None):
        """x (t, width) after layer i, whose cache grows by these t tokens."""
        chunks = [x[n : n + CHUNK] for n in range(0, len(x), CHUNK)]
        return np.concatenate(
            [self._layer(i, c, cache, kv_dtype, record) for c in chunks]
        )

    def heads(self, i, x, positions):
        """Layer i's queries, keys and values of x (t, width)."""
        c, w = self.config, self.layers[i]
        h = rms_norm(x, w["attn_norm"], c.eps)
        q = split_heads(linear(h, w["attn_q"]), c.q_heads)
        k = split_heads(linear(h, w["attn_k"]), c.kv_heads)
        v = split_heads(linear(h, w["attn_v"]), c.kv_heads)
        if c.gemma:
            q = rms_norm(q, w["attn_q_norm"], c.eps)
            k = rms_norm(k, w["attn_k_norm"], c.eps)
        rotated = [
            rope(a, positions, c.rope_bases[i]).astype(np.float32) for a in (q, k)
        ]
        return Heads(*rotated, v, k)

    def _layer(self, i, x, cache, kv_dtype, record):
        """x + attention, then + feed_forward; Gemma norms both before adding them."""
        c, w = self.config, self.layers[i]
        heads = self.heads(i, x, tokens_seen(cache) + np.arange(len(x)))
        if record is not None:
            record(i, heads)
        k, v = (cast(a, kv_dtype) for a in (heads.k, heads.v))
        a = attend(cache, heads.q, k, v, c.head_dim**-0.5, c.windows[i])
        x = x + self._after(linear(merge_heads(a), w["attn_output"]), i, "attention")
        f = feed_forward(
            rms_norm(x, w["ffn_norm"], c.eps),
            *(w[f"ffn_{part}"] for part in ("gate", "up", "down")),
            gelu if c.gemma else silu,
        )
        return x + self._after(f, i, "ffw")

    def last_norm(self, x):
        """The hidden states that `logits` takes, of the last layer's x (t, width)."""
        return rms_norm(x, self.norm, self.config.eps)

    def _after(self, y, i, part):
        w = self.layers[i].get(f"post_{part}_norm")
        return y if w is None else rms_norm(y, w, self.config.eps)

    def logits(self, hidden):
        """hidden E^T: float32 (t, vocab) of the hidden states (t, width)."""
        return linear(hidden, self.head)

    def generate(self, tokens, count, policy="fp32", stop=(), kv_dtype="float32"):
        """`count` more tokens, each the most likely one, through caches of `policy`.

        stop : ids that end the text (they are not returned). Yields one id at a time.
        """
        caches = self.caches(policy)
        for _ in range(count):
            hidden = self.forward(tokens, caches, kv_dtype)
            token = int(np.argmax(self.logits(hidden[-1:])))
            if token in stop:
                return
            yield token
            tokens = [token]


def load(path):
    """The Decoder in a GGUF file, all weights as float32.

    Raises OSError, or ValueError that names the file and what is wrong with it:
    unsupported architecture, missing or unknown tensors, shapes, types.
    """
    file = open_gguf(path)
    c = read_config(file)
    E = (c.vocab, c.width)
    shapes = {
        f"blk.{i}.{n}.weight": s
        for i in range(c.layers)
        for n, s in weight_shapes(c).items()
    }
    shapes |= {"token_embd.weight": E, "output_norm.weight": (c.width,)}
    unknown = file.names - set(shapes) - {"output.weight"}
    if unknown:
        raise file.error(f"unknown tensor {min(unknown)!r} in a {c.architecture} model")
    for name, shape in shapes.items():  # before anything large is read
        if file.shape(name) != shape:
            raise file.error(f"{name} is {file.shape(name)}; expected {shape}")
    embedding = file.tensor("token_embd.weight", E)
    tied = "output.weight" not in file.names
    return Decoder(
        config=c,
        embedding=embedding,
        layers=[_read_layer(file, c, i) for i in range(c.layers)],
        norm=file.tensor("output_norm.weight", (c.width,)),
        head=embedding if tied else file.tensor("output.weight", E),
    )


def _read_layer(file, c, i):
    w = {
        name: file.tensor(f"blk.{i}.{name}.weight", shape)
        for name, shape in weight_shapes(c).items()
    }
    if c.architecture == "llama":
        w["attn_q"] = half_split(w["attn_q"], c.q_heads)
        w["attn_k"] = half_split(w["attn_k"], c.kv_heads)
    return w

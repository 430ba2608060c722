"""Tiny random models as GGUF files, and decoders of them in plain loops.

The plain decoders take the arrays that were written to the file. They visit one token
of one head at a time, in float64, and rotate Llama's channels in the order of the file,
as llama.cpp does. They share no code with the package.
"""

import math

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

LLAMA = {
    "architecture": "llama",
    "layers": 2,
    "width": 20,
    "hidden": 28,
    "q_heads": 6,
    "kv_heads": 2,
    "head_dim": 10,
    "vocab": 37,
    "context": 90,
    "eps": 1e-5,
    "base": 500.0,
    "window": None,
}
GEMMA = LLAMA | {
    "architecture": "gemma3",
    "layers": 7,  # layers 0..4 and 6 slide, 5 sees everything
    "eps": 1e-6,
    "base": 1e6,
    "window": 5,
}


def random_weights(c, seed=0, tied=True):
    """{GGUF name: float32 array}; norms near 1, key channel 1 of each head large."""
    rng = np.random.default_rng(seed)
    D, W, F = c["head_dim"], c["width"], c["hidden"]
    Q, KV = c["q_heads"] * D, c["kv_heads"] * D
    shapes = {"attn_q": (Q, W), "attn_k": (KV, W), "attn_v": (KV, W)}
    shapes |= {"attn_output": (W, Q), "attn_norm": (W,), "ffn_norm": (W,)}
    shapes |= {"ffn_gate": (F, W), "ffn_up": (F, W), "ffn_down": (W, F)}
    if c["architecture"] == "gemma3":
        shapes |= {"attn_q_norm": (D,), "attn_k_norm": (D,)}
        shapes |= {"post_attention_norm": (W,), "post_ffw_norm": (W,)}
    w = {"token_embd.weight": rng.standard_normal((c["vocab"], W))}
    w["output_norm.weight"] = 1 + 0.3 * rng.standard_normal(W)
    if not tied:
        w["output.weight"] = rng.standard_normal((c["vocab"], W))
    for i in range(c["layers"]):
        for name, shape in shapes.items():
            x = rng.standard_normal(shape)
            x = x / math.sqrt(W) if len(shape) == 2 else 1 + 0.3 * x
            w[f"blk.{i}.{name}.weight"] = x
        w[f"blk.{i}.attn_k.weight"][1::D] *= 4
    return {name: x.astype(np.float32) for name, x in w.items()}


def write(path, c, weights, quantized=(), **changes):
    """Write a model. quantized : {name: gguf type}; changes : metadata to add."""
    out = gguf.GGUFWriter(path, c["architecture"])
    out.add_block_count(c["layers"])
    out.add_context_length(c["context"])
    out.add_embedding_length(c["width"])
    out.add_feed_forward_length(c["hidden"])
    out.add_head_count(c["q_heads"])
    out.add_head_count_kv(c["kv_heads"])
    out.add_key_length(c["head_dim"])
    out.add_layer_norm_rms_eps(c["eps"])
    out.add_rope_freq_base(c["base"])
    if c["window"]:
        out.add_sliding_window(c["window"])
    for key, value in changes.items():
        add = out.add_string if isinstance(value, str) else out.add_uint32
        add(key.replace("__", "."), value)
    for name, x in weights.items():
        if name in quantized:
            kind = quantized[name]
            out.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, x)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


# --- plain loops ----------------------------------------------------------------------
def norm(x, w, eps):
    """RMSNorm of one vector."""
    mean = sum(float(a) ** 2 for a in x) / len(x)
    return np.array([a / math.sqrt(mean + eps) * b for a, b in zip(x, w, strict=True)])


def rotate(x, position, base, pairs):
    """RoPE of one vector whose `pairs` of channels turn together."""
    y = np.array(x)
    for n, (i, j) in enumerate(pairs):
        angle = position * base ** (-2 * n / len(x))
        c, s = math.cos(angle), math.sin(angle)
        y[i], y[j] = x[i] * c - x[j] * s, x[i] * s + x[j] * c
    return y


def gate(a, gemma):
    """SiLU, or the tanh form of GELU, of one number."""
    if gemma:
        inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
        return a / 2 * (1 + math.tanh(inner))
    return a / (1 + math.exp(-a))


def logits(c, weights, tokens):
    """Logits after each token, float64 (T, vocab)."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    gemma = c["architecture"] == "gemma3"
    scale = math.sqrt(c["width"]) if gemma else 1.0
    xs = [w["token_embd.weight"][t] * scale for t in tokens]
    for i in range(c["layers"]):
        layer = {
            name.split(".")[2]: x
            for name, x in w.items()
            if name.startswith(f"blk.{i}.")
        }
        xs = _layer(c, layer, xs, gemma, sliding=gemma and i % 6 != 5)
    head = w.get("output.weight", w["token_embd.weight"])
    return np.array([head @ norm(x, w["output_norm.weight"], c["eps"]) for x in xs])


def _layer(c, w, xs, gemma, sliding):
    D, eps = c["head_dim"], c["eps"]
    base = 10000.0 if sliding else c["base"]
    if gemma:
        pairs = [(i, i + D // 2) for i in range(D // 2)]
    else:
        pairs = [(2 * i, 2 * i + 1) for i in range(D // 2)]
    qs, ks, vs = [], [], []
    for t, x in enumerate(xs):
        h = norm(x, w["attn_norm"], eps)
        q, k = (w[f"attn_{n}"] @ h for n in "qk")
        q, k = (y.reshape(-1, D) for y in (q, k))
        if gemma:
            q = [norm(y, w["attn_q_norm"], eps) for y in q]
            k = [norm(y, w["attn_k_norm"], eps) for y in k]
        qs.append([rotate(y, t, base, pairs) for y in q])
        ks.append([rotate(y, t, base, pairs) for y in k])
        vs.append((w["attn_v"] @ h).reshape(-1, D))
    out = []
    for t, x in enumerate(xs):
        first = max(0, t - c["window"] + 1) if sliding else 0
        heads = [_attend(c, qs, ks, vs, t, h, first) for h in range(c["q_heads"])]
        a = w["attn_output"] @ np.concatenate(heads)
        x = x + (norm(a, w["post_attention_norm"], eps) if gemma else a)
        h = norm(x, w["ffn_norm"], eps)
        g = [gate(a, gemma) for a in w["ffn_gate"] @ h]
        f = w["ffn_down"] @ (np.array(g) * (w["ffn_up"] @ h))
        out.append(x + (norm(f, w["post_ffw_norm"], eps) if gemma else f))
    return out


def _attend(c, qs, ks, vs, t, h, first):
    kv = h // (c["q_heads"] // c["kv_heads"])
    seen = range(first, t + 1)
    s = [float(qs[t][h] @ ks[j][kv]) / math.sqrt(c["head_dim"]) for j in seen]
    p = [math.exp(a - max(s)) for a in s]
    return sum(a * vs[j][kv] for a, j in zip(p, seen, strict=True)) / sum(p)

r"""What a policy costs: perplexity, divergence and agreement, by teacher forcing.

The model reads a text; at each scored position it gives the next token a probability.

    nll = -ln p(next token)            perplexity = exp(mean nll)
    d   = nll with this cache - nll with the unquantized cache, same position
    change = exp(mean d) - 1           standard error of mean d = std(d) / sqrt(n)
    KL(p || p') = sum_v p_v ln(p_v / p'_v)     agreement = share of equal argmax

p is the model with keys and values as the forward pass computes them (float32), p' with
a cache of the policy. The text is cut into windows of tokens, each with a cache of its
own; the first positions of a window have little to look back at and are not scored.

Keys and values enter the cache as float16, are packed into `QuantizedTensor`s and read
back. Each query sees the cache as it is when its token is the newest: a residual window
counts as it does while a text is being generated (`kvq.model.attend` says how). Where
keys are stored per channel, the newest tokens that do not fill a group yet are in full
precision even with residual=0: a measurement that gives them scales of whole groups,
which know of later tokens, finds more harm.

Positions are treated as independent in the standard error; neighbours are not quite, so
it is a little too small.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvq.layers import LayerPolicies, parse_layers
from kvq.model.decoder import load
from kvq.scheme import Policy, policy
from kvq.study import run
from kvq.tables import provenance, read_table, write_table

BLOCK = 64  # positions whose logits exist at one time


@dataclass(frozen=True)
class Protocol:
    """Which positions of a text are scored.

    window : tokens per window. start : the first scored position of a window.
    limit : windows, at most; None: as many whole windows as the text has.
    """

    window: int = 1024
    start: int = 256
    limit: int | None = 3

    def __post_init__(self):
        if not 0 <= self.start < self.window - 1:
            raise ValueError(
                f"start={self.start}, window={self.window}; valid: 0..window - 2"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit!r}; valid: an integer >= 1 or None")

    def windows(self, tokens, bos=None):
        """The windows of a text, each after `bos` if there is one: a list of id arrays.

        Raises ValueError for a text that does not fill a window.
        """
        first = [] if bos is None else [bos]
        fresh = self.window - len(first)
        count = len(tokens) // fresh
        count = count if self.limit is None else min(count, self.limit)
        if count < 1:
            raise ValueError(f"{len(tokens)} tokens; a window needs {fresh}")
        return [
            np.array([*first, *tokens[n * fresh : (n + 1) * fresh]])
            for n in range(count)
        ]


# --- one window -----------------------------------------------------------------------
def log_softmax(z):
    r"""ln p_v = z_v - m - ln sum_u exp(z_u - m), m = max_u z_u."""
    z = z - z.max(axis=-1, keepdims=True)
    with np.errstate(under="ignore"):
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def hidden_states(model, window, start, policies, kv_dtype="float16"):
    """Hidden states of the scored positions, start .. end - 2: float32 (n, width).

    policies : as `Decoder.caches` takes them. Returns the states and the caches.
    """
    caches = model.caches(policies)
    hidden = model.forward(window[:-1], caches, kv_dtype)
    return hidden[start:], caches


def compare(model, exact, changed, targets):
    """nll, d, kl, agree per position, float64 (n,), of two sets of hidden states.

    exact, changed : (n, width), with the unquantized and with the policy's cache.
    targets : the n ids that came next in the text.
    """
    parts = []
    for n in range(0, len(targets), BLOCK):
        block = slice(n, n + BLOCK)
        z, z_hat = (model.logits(h[block]) for h in (exact, changed))
        parts.append(compare_logits(z, z_hat, targets[block]))
    return {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}


def compare_logits(z, z_hat, targets):
    """The same of logits (n, vocab), without and with quantization."""
    lp, lp_hat = (log_softmax(x.astype(np.float64)) for x in (z, z_hat))
    rows = np.arange(len(lp)), targets
    with np.errstate(under="ignore"):
        kl = np.sum(np.exp(lp) * (lp - lp_hat), axis=-1)
    return {
        "nll": -lp_hat[rows],
        "d": lp[rows] - lp_hat[rows],
        "kl": kl,
        "agree": lp.argmax(axis=-1) == lp_hat.argmax(axis=-1),
    }


@lru_cache(maxsize=1)
def load_once(path):
    """The Decoder at `path`; the last one loaded is kept for the next call."""
    return load(path)


def exact_point(path, window, start):
    """{hidden: states of the scored positions} with the unquantized cache."""
    hidden, _ = hidden_states(load_once(path), window, start, "fp32", "float32")
    return {"hidden": hidden}


def policy_point(path, window, start, exact, policies):
    """The columns of `compare`, and bits, of one window with the policies' caches."""
    model = load_once(path)
    hidden, caches = hidden_states(model, window, start, policies)
    scored = compare(model, exact, hidden, window[start + 1 :])
    return scored | {"bits": stored_bits(model, caches)}


def stored_bits(model, caches):
    """Bits per stored number: a sliding layer holds fewer tokens than another."""
    c = model.config
    numbers = 2 * c.kv_heads * c.head_dim * sum(map(len, caches))
    return 8 * sum(cache.nbytes for cache in caches) / numbers


# --- a table --------------------------------------------------------------------------
def summary(name, points):
    """One row of the table from the points (windows) of one policy.

    Columns: policy, tokens (scored), bits_per_element (stored at the end of a window),
    perplexity, change_percent, se_percent (100 times the standard error of mean d), kl,
    agreement.
    """
    nll, d, kl, agree = (
        np.concatenate([p[key] for p in points]) for key in ("nll", "d", "kl", "agree")
    )
    return {
        "policy": name,
        "tokens": len(d),
        "bits_per_element": float(np.mean([p["bits"] for p in points])),
        "perplexity": math.exp(nll.mean()),
        "change_percent": 100 * math.expm1(d.mean()),
        "se_percent": 100 * float(d.std(ddof=1)) / math.sqrt(len(d)),
        "kl": float(kl.mean()),
        "agreement": float(agree.mean()),
    }


def evaluate(
    path,
    tokens,
    policies,
    protocol=None,
    *,
    bos=None,
    out=None,
    jobs=1,
    progress=False,
):
    """The table of a list of policies: one row each, as `summary` describes.

    path : a GGUF file. tokens : ids of a text. policies : a list of Policies,
    LayerPolicies or texts that `kvq.layers.parse_layers` reads; or {name: one of them,
    a preset's name, or a list of Policies, one per layer}.
    bos : the id that must come first in a window (`tokenizer.bos_token`), or None.
    out : a CSV file, written after every policy. Rows that it already holds are not
        computed again; it must come from the same model, text and protocol.
    jobs : processes, through joblib, as in `kvq.study.run`.
    Raises ValueError for a text that is too short and for an `out` of other origin.
    """
    protocol = protocol or Protocol()
    policies = _by_name(policies)
    windows = protocol.windows(np.asarray(tokens), bos)
    facts = setup(path, windows, protocol)
    rows = resume(out, facts)
    todo = [name for name in policies if name not in {row["policy"] for row in rows}]
    if not todo:
        return rows
    path, start = str(path), protocol.start
    points = [(path, window, start) for window in windows]
    exact = [p["hidden"] for p in run(exact_point, points, jobs, progress)]
    for name in _progress(todo, progress):
        points = [
            (path, window, start, hidden, policies[name])
            for window, hidden in zip(windows, exact, strict=True)
        ]
        rows.append(summary(name, run(policy_point, points, jobs, progress)))
        if out is not None:
            header = facts | provenance(_command(path, protocol, rows))
            write_table(out, rows, header)
    return rows


def _command(path, protocol, rows):
    """The command that makes these rows; a text of one's own is not named."""
    names = " ".join(row["policy"] for row in rows)
    limit = "" if protocol.limit is None else f" --windows {protocol.limit}"
    return (
        f"kvq eval {Path(path).name} --window {protocol.window} "
        f"--start {protocol.start}{limit} --policies {names}"
    )


def _by_name(policies):
    if isinstance(policies, dict):
        kinds = (Policy, LayerPolicies, list, tuple)
        return {
            name: p if isinstance(p, kinds) else policy(p)
            for name, p in policies.items()
        }
    read = [parse_layers(p) if isinstance(p, str) else p for p in policies]
    return {p.name: p for p in read}


def _progress(names, progress):
    if not progress:
        return names
    from tqdm import tqdm

    return tqdm(names, unit="policy", leave=False)


def setup(path, windows, protocol):
    """What a table's rows have in common, as text."""
    with Path(path).open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    text = hashlib.sha256(np.asarray(windows, "<i4").tobytes()).hexdigest()
    return {
        "model": Path(path).name,
        "weights_sha256": weights,
        "token_ids_sha256": text,
        "protocol": f"{len(windows)} windows of {protocol.window} tokens, scored from "
        f"position {protocol.start}",
    }


def resume(out, facts):
    """The rows that a CSV file already holds; [] without one.

    Raises ValueError if its header says another thing than `facts`.
    """
    if out is None or not Path(out).exists():
        return []
    rows, header = read_table(out)
    for key, value in facts.items():
        if header.get(key) != value:
            raise ValueError(
                f"{out} was made with {key} {header.get(key)}, not {value}; "
                "give another file, or remove it"
            )
    return rows

r"""Bits where they matter: measured sensitivities, an exact choice, and its check.

One layer's keys, or its values, are stored by a candidate, everything else as float16:

    loss(layer, side, c) = mean over positions of KL(p || p')       `sensitivities`

Losses of small, independent errors add, so a choice c(layer, side) is expected to cost

    predicted KL = sum over layers and sides of loss(layer, side, c(layer, side))

and the cheapest choice for a budget is a knapsack, solved exactly (`frontier`). That
losses add is a model: measure what was chosen as a whole, with `kvq.model.evaluate`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvq.layers import LayerPolicies
from kvq.model.decoder import read_config
from kvq.model.evaluate import (
    Protocol,
    compare,
    exact_point,
    load_once,
    resume,
    setup,
)
from kvq.model.gguf_file import open_gguf
from kvq.scheme import FP16
from kvq.study import run
from kvq.tables import provenance, write_table

SIDES = ("key", "value")
KEPT = {"key": "value", "value": "key"}  # the side that stays in float16


# --- sensitivities --------------------------------------------------------------------
def sensitivities(
    path,
    tokens,
    candidates,
    protocol=None,
    *,
    bos=None,
    out=None,
    jobs=1,
    progress=False,
):
    """What each candidate costs in each layer, for its keys and for its values alone.

    path, tokens, protocol, bos, jobs : as `kvq.model.evaluate.evaluate` takes them.
    candidates : Policies with names and with the same residual and sinks.
    out : a CSV file, written after every layer; what it already holds is not computed
        again.
    Returns rows: layer, side, candidate, bytes (of the layer's share of a window's
    tokens, all of them quantized), bits (per number), kl, kl_se (its standard error).
    Raises ValueError as `evaluate` does, and for candidates with different windows.
    """
    protocol = protocol or Protocol()
    _check_candidates(candidates)
    config = read_config(open_gguf(path))
    windows = protocol.windows(np.asarray(tokens), bos)
    facts = setup(path, windows, protocol) | {"full_precision": _window(candidates[0])}
    rows = resume(out, facts)
    done = {(row["layer"], row["side"], row["candidate"]) for row in rows}
    todo = [
        [(layer, side, c) for side in SIDES for c in candidates]
        for layer in range(config.layers)
    ]
    todo = [[x for x in part if (*x[:2], x[2].name) not in done] for part in todo]
    todo = [part for part in todo if part]
    if not todo:
        return rows
    path, start = str(path), protocol.start
    points = [(path, window, start) for window in windows]
    exact = [p["hidden"] for p in run(exact_point, points, jobs, progress)]
    inputs = [p["inputs"] for p in run(inputs_point, [p[:2] for p in points], jobs)]
    for part in _bar(todo, progress):
        points = [
            (path, window, start, hidden, x[item[0]], *item)
            for item in part
            for window, hidden, x in zip(windows, exact, inputs, strict=True)
        ]
        kl = np.array([p["kl"] for p in run(one_side_point, points, jobs)])
        for item, values in zip(part, kl.reshape(len(part), -1), strict=True):
            rows.append(_row(config, protocol.window, *item, values))
        if out is not None:
            command = _command(path, protocol, candidates)
            write_table(out, rows, facts | provenance(command))
    return rows


def _check_candidates(candidates):
    if not candidates:
        raise ValueError("no candidates; valid: one or more policies")
    names = [c.name for c in candidates]
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"candidates {names}; valid: names that differ")
    windows = {_window(c) for c in candidates}
    if len(windows) > 1:
        raise ValueError(
            f"candidates with {' and with '.join(sorted(windows))}; valid: the same "
            "window for all, since keys and values of a layer share it"
        )


def _window(policy):
    return f"residual {policy.residual}, sinks {policy.sinks}"


def inputs_point(path, window):
    """{inputs: of every layer, (t, width) each} with float16 keys and values."""
    model, inputs = load_once(path), []
    x = model.embed(window[:-1])
    for i, cache in enumerate(model.caches("fp16")):
        inputs.append(x)
        x = model.layer(i, x, cache, "float16")
    return {"inputs": inputs}


def one_side_point(path, window, start, exact, x, layer, side, candidate):
    """The columns of `compare` of one window, one side of one layer by the candidate.

    x : the layer's inputs. The layers before it are as they were, and do not run.
    """
    model = load_once(path)
    caches = model.caches(_one_side(model.config.layers, layer, side, candidate))
    for i in range(layer, model.config.layers):
        x = model.layer(i, x, caches[i], "float16")
    return compare(model, exact, model.last_norm(x[start:]), window[start + 1 :])


def _one_side(layers, layer, side, candidate):
    """Policies of all layers: one side of one layer by the candidate, else float16."""
    policies = [replace(candidate, key=FP16, value=FP16)] * layers
    policies[layer] = replace(candidate, **{KEPT[side]: FP16})
    return policies


def _row(config, window, layer, side, candidate, kl):
    H, D = config.kv_heads, config.head_dim
    T = min(window, config.windows[layer] or window)
    scheme = getattr(candidate, side)
    return {
        "layer": layer,
        "side": side,
        "candidate": candidate.name,
        "bytes": scheme.nbytes(H, T, D),
        "bits": scheme.bits_per_element(T, D, H),
        "kl": float(kl.mean()),
        "kl_se": float(kl.std(ddof=1)) / math.sqrt(len(kl)),
    }


def _bar(layers, progress):
    if not progress:
        return layers
    from tqdm import tqdm

    return tqdm(layers, unit="layer", leave=False)


def _command(path, protocol, candidates):
    limit = "" if protocol.limit is None else f" --windows {protocol.limit}"
    residual = candidates[0].residual
    names = " ".join(c.name.removesuffix(f":residual={residual}") for c in candidates)
    return (
        f"kvq search {Path(path).name} --window {protocol.window} --start "
        f"{protocol.start}{limit} --residual {residual} --policies {names}"
    )


# --- the knapsack ---------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Frontier:
    """Assignments that no other beats in cost and in loss, from cheap to good.

    cost, loss : of each of them. steps : for `choice`.
    """

    cost: np.ndarray
    loss: np.ndarray
    steps: list

    def choice(self, n):
        """The candidate of every item in assignment n: a list of integers."""
        chosen = []
        for before, candidate in reversed(self.steps):
            chosen.append(int(candidate[n]))
            n = before[n]
        return chosen[::-1]


# F_0 = {(0, 0)},   F_n = front {(c + c_nj, l + l_nj): (c, l) in F_(n-1), j}
def frontier(costs, losses):
    """The exact front of sum of costs against sum of losses: one candidate per item.

    costs : (n, m) integers, of candidate j for item n. losses : (n, m).
    A part of an assignment on the front is on the front of its items, so keeping one
    front per item loses nothing. A front has as many points as there are different
    costs, at most: costs with a common unit keep it small.
    """
    cost, loss, steps = np.zeros(1, np.int64), np.zeros(1), []
    for c_n, l_n in zip(np.asarray(costs), np.asarray(losses), strict=True):
        cost, loss = (cost[:, None] + c_n).ravel(), (loss[:, None] + l_n).ravel()
        order = np.lexsort((loss, cost))
        best = np.minimum.accumulate(loss[order])
        front = order[np.r_[True, best[1:] < best[:-1]]]
        steps.append(np.divmod(front, len(c_n)))  # (point before, candidate)
        cost, loss = cost[front], loss[front]
    return Frontier(cost, loss, steps)


# --- from rows to a preset ------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Search:
    """The sensitivities of a model as a problem: items are (layer, side).

    candidates : Policies. items : [(layer, side)]. bytes, kl : (items, candidates).
    numbers : how many numbers all layers hold. tokens : of a window.
    """

    candidates: list
    items: list
    bytes: np.ndarray
    kl: np.ndarray
    numbers: int
    tokens: int

    @classmethod
    def of(cls, rows, candidates, tokens):
        """From the rows of `sensitivities` for windows of `tokens` tokens."""
        found = {(r["layer"], r["side"], r["candidate"]): r for r in rows}
        layers = range(1 + max(row["layer"] for row in rows))
        items = [(layer, side) for layer in layers for side in SIDES]
        table = [[found[(*item, c.name)] for c in candidates] for item in items]
        numbers = sum(round(8 * row["bytes"] / row["bits"]) for row, *_ in table)
        nbytes, kl = (
            np.array([[row[key] for row in line] for line in table])
            for key in ("bytes", "kl")
        )
        return cls(candidates, items, nbytes, kl, numbers, tokens)

    def bits(self, nbytes):
        """Bits per number of a cache of so many bytes."""
        return 8 * nbytes / self.numbers

    def uniform(self):
        """(bits, predicted KL) of each candidate in all layers, on both sides."""
        return list(
            zip(self.bits(self.bytes.sum(axis=0)), self.kl.sum(axis=0), strict=True)
        )

    def solve(self):
        """The Frontier of all assignments."""
        return frontier(self.bytes, self.kl)

    def within(self, front, *, bits=None, kl=None):
        """Where on the Frontier a budget leads: an index.

        bits : per number, at most. kl : predicted, at most. One of the two.
        Raises ValueError where no assignment is within the budget.
        """
        if bits is not None:
            least = self.bits(front.cost[0])
            if not least <= bits:
                raise ValueError(f"budget of {bits:g} bits; valid: >= {least:.4g}")
            limit = bits * self.numbers / 8
            return int(np.searchsorted(front.cost, limit, side="right")) - 1
        if not front.loss[-1] <= kl:
            raise ValueError(f"budget of KL {kl:g}; valid: >= {front.loss[-1]:.2g}")
        return int(np.argmax(front.loss <= kl))

    def policies(self, choice, name=""):
        """LayerPolicies of a choice; the most frequent pair is the default."""
        chosen = dict(zip(self.items, choice, strict=True))
        layers = [self._pair(chosen, n) for n in range(len(self.items) // 2)]
        default = max(layers, key=layers.count)
        others = {n: p for n, p in enumerate(layers) if p != default}
        return LayerPolicies(default, others, name)

    def _pair(self, chosen, layer):
        key, value = (self.candidates[chosen[layer, side]] for side in SIDES)
        if key == value:
            return key
        keys, *settings = key.name.split(":")
        keys, values = keys.split("/")[0], value.name.split(":")[0].split("/")[-1]
        name = ":".join([f"{keys}/{values}", *settings])
        return replace(key, value=value.value, name=name)

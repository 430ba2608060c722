"""What `kvq bench cpu` is measured against: goals, and what its rows say about them.

A goal is a ratio within one run, never a time. Each is judged by rows alone: it holds,
it does not, or it cannot be said, and then why.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

T = 65536
GROWTH_FROM, GROWTH_TO = 512, 262144
TORCH = ("sdpa", "matmul")  # forms of attention in full precision


class Unknown(LookupError):
    """A row that a goal needs has no time; says why."""


@dataclass(frozen=True)
class Goal:
    """text, what is asked (low or more, high or less), and a function of rows."""

    text: str
    measure: object
    low: float | None = None
    high: float | None = None
    unit: str = "x"

    @property
    def asked(self):
        if self.low is None:
            return f"<= {self.high:,g}{self.unit}"
        if self.high is None:
            return f">= {self.low:g}{self.unit}"
        return f"{self.low:g} .. {self.high:g}{self.unit}"

    def holds(self, value):
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high)


def verdicts(rows):
    """A dict for each goal: goal, asked, measured (None if unknown), verdict."""
    found = []
    for goal in GOALS:
        measured, verdict = None, None
        try:
            measured = goal.measure(rows)
            verdict = "holds" if goal.holds(measured) else "does not hold"
        except Unknown as why:
            verdict = f"cannot be said: {why}"
        found.append(
            {"goal": goal.text, "asked": goal.asked, "measured": measured}
            | {"unit": goal.unit, "verdict": verdict}
        )
    return found


# --- rows -----------------------------------------------------------------------------
def pick(rows, **wanted):
    """The rows that have these values."""
    return [r for r in rows if all(r[key] == x for key, x in wanted.items())]


def the_row(rows, **wanted):
    """The timed row that has these values. Raises Unknown if there is none."""
    found = pick(rows, **wanted)
    timed = [row for row in found if row["seconds"]]
    if timed:
        return timed[0]
    what = [
        str(wanted[key]) for key in ("system", "version", "storage") if key in wanted
    ]
    why = next((row["note"] for row in found if row["note"]), "not measured")
    if "T" in wanted and not pick(rows, op=wanted.get("op"), T=wanted["T"]):
        why = f"not measured at T = {wanted['T']:,}"
    raise Unknown(f"{' '.join(what)} {why}")


def fastest_torch(rows, **wanted):
    """The row of torch's fastest form. Raises Unknown if torch has none."""
    found = []
    for version in TORCH:
        for row in pick(rows, op="decode", system="torch", version=version, **wanted):
            found += [row] if row["seconds"] else []
    if not found:
        return the_row(rows, op="decode", system="torch", **wanted)
    return min(found, key=lambda row: row["seconds"])


# --- what goals ask for ---------------------------------------------------------------
def over_torch(rows, version, storage):
    ours = _ours(rows, "main", version, storage)
    return fastest_torch(rows, scene="main", T=T)["seconds"] / ours["seconds"]


def over_ggml(rows, storage):
    ours = _ours(rows, "main", "v4", "int4")
    main = {"scene": "main", "op": "decode", "T": T}
    theirs = the_row(rows, system="ggml", storage=storage, **main)
    return theirs["seconds"] / ours["seconds"]


def roofline(rows, scene):
    return _ours(rows, scene, "v4", "int4")["roofline_percent"]


def pack_over(rows, system, version, storage):
    pack = {"scene": "pack", "op": "pack", "T": T}
    ours = the_row(rows, system="kvq", version="token", storage="int4", **pack)
    theirs = the_row(rows, system=system, version=version, storage=storage, **pack)
    return theirs["seconds"] / ours["seconds"]


def _ours(rows, scene, version, storage):
    what = {"op": "decode", "system": "kvq", "version": version, "storage": storage}
    return the_row(rows, scene=scene, T=T, **what)


def sweep(rows):
    """[(T, our row)] of v4 with 4 bits, the shortest context first."""
    what = {"op": "decode", "system": "kvq", "version": "v4", "storage": "int4"}
    found = [r for r in pick(rows, scene="sweep", **what) if r["seconds"]]
    if not found:
        the_row(rows, scene="sweep", **what)
    return sorted(((r["T"], r) for r in found), key=lambda pair: pair[0])


def crossover(rows):
    """The shortest context of the sweep from which v4 with 4 bits is always faster than
    torch's fastest form; infinity if it is not at the longest. Raises Unknown."""
    first, compared = np.inf, False
    for tokens, ours in reversed(sweep(rows)):
        try:
            torch = fastest_torch(rows, scene="sweep", T=tokens)
        except Unknown:
            if compared:
                raise
            continue  # longer than what torch was given
        compared = True
        if ours["seconds"] >= torch["seconds"]:
            break
        first = tokens
    if not compared:
        return fastest_torch(rows, scene="sweep")["T"]
    return first


#     seconds = c T^a:  a is the slope of log seconds over log T
def exponent(rows):
    """Of v4 with 4 bits from GROWTH_FROM to GROWTH_TO tokens."""
    points = [
        (t, r["seconds"]) for t, r in sweep(rows) if GROWTH_FROM <= t <= GROWTH_TO
    ]
    for end in (GROWTH_FROM, GROWTH_TO):
        if end not in [t for t, _ in points]:
            raise Unknown(f"not measured at T = {end:,}")
    x, y = np.log(points).T
    return float(np.polyfit(x, y, 1)[0])


def _goals():
    for version, asked in (("v4", (7, 5, 10)), ("v3", (2, 1.6, 2.3))):
        for storage, low in zip(("int4", "int8", "int2"), asked, strict=True):
            text = f"{version} {storage} decode over the fastest torch form"
            yield Goal(text, partial(over_torch, version=version, storage=storage), low)
    for storage, low in (("f16", 8), ("q4_0", 20)):
        text = f"v4 int4 decode over ggml {storage}"
        yield Goal(text, partial(over_ggml, storage=storage), low)
    for scene, text, low in (
        ("main", "4 queries per KV head", 55),
        ("one head", "1 query per KV head", 90),
    ):
        text = f"v4 int4 of the roofline, {text}"
        yield Goal(text, partial(roofline, scene=scene), low, unit=" %")
    for peer, name, low in (
        (("numpy", "blocked", "int4"), "blocked NumPy", 9),
        (("torch", "whole tensor", "int4"), "KIVI-style torch", 14),
        (("ggml", "quantize_chunk", "q4_0"), "ggml q4_0", 2.5),
    ):
        measure = partial(pack_over, system=peer[0], version=peer[1], storage=peer[2])
        yield Goal(f"int4 pack over {name}", measure, low)
    yield Goal("crossover with the fastest torch form", crossover, None, 128, " tokens")
    text = f"growth with T, {GROWTH_FROM:,} .. {GROWTH_TO:,}: exponent"
    yield Goal(text, exponent, 0.95, 1.05, "")


GOALS = tuple(_goals())

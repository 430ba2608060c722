"""Record what policies cost two real models in perplexity.

python figures/quality.py            everything: hours on one core
python figures/quality.py search     one of RECORDS

Writes data/quality_*.csv, rotation_*.csv, sensitivity_*.csv, and search_, protocol_ and
positions_smollm2.csv. A run that was stopped goes on where it stopped. Needs weights:
`kvq model fetch smollm2-135m`, and gemma-3-270m for the records with gemma3 in them.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from kvq.layers import parse_policy
from kvq.model import decoder, load, weights
from kvq.model.evaluate import (
    Protocol,
    compare,
    evaluate,
    hidden_states,
    setup,
    summary,
)
from kvq.model.gguf_file import open_gguf
from kvq.model.search import Search, sensitivities
from kvq.model.texts import bundled_tokens
from kvq.model.tokenizer import bos_token, tokenizer
from kvq.scheme import FP16, PRESETS, Policy, Scheme
from kvq.tables import provenance, read_table, write_table
from kvq.tensor import quantize

DATA = Path(__file__).resolve().parent / "data"
POLICIES = [
    "fp16",
    "int8-token",
    "int4-token-g64",
    "int4-token-g64-asym",
    "int4-token-g32-asym",
    "kivi-4",
    "kivi-2",
    "int4-token-g64-asym/fp16",
    "fp16/int4-token-g64-asym",
    "int4-channel-g32/int4-token-g64-asym",
    "kivi-2:residual=0",
    "kivi-2:residual=32",
]


def both(scheme):
    return Policy(scheme, scheme)


TOKEN = PRESETS["int4-token-g32-asym"].key  # beside rotated-int4
CHANNEL = PRESETS["int4-channel-g32"].key
WHOLE = Scheme(4, "token", None, "asymmetric")  # one scale for a token's whole head
BOTH_SIDES = {
    "token, one scale": both(WHOLE),
    "token, one scale, rotated": both(replace(WHOLE, transform="hadamard")),
    "token, G=32": both(TOKEN),
    "token, G=32, rotated": both(replace(TOKEN, transform="hadamard")),
}
ONE_SIDE = {
    "keys: token, G=32": Policy(TOKEN, FP16),
    "keys: token, G=32, rotated": Policy(replace(TOKEN, transform="hadamard"), FP16),
    "values: token, G=32": Policy(FP16, TOKEN),
    "values: token, G=32, rotated": Policy(FP16, replace(TOKEN, transform="hadamard")),
    "keys: channel, G=32": Policy(CHANNEL, FP16),
    "keys: channel, G=32, rotated": Policy(
        replace(CHANNEL, transform="hadamard"), FP16
    ),
}
CANDIDATES = {
    "smollm2": ["kivi-2", "kivi-3", "kivi-4"],
    "gemma3": ["kivi-2"],
}
BUDGETS = 3.5, 4, 4.5


@dataclass(frozen=True)
class Model:
    """A model to measure. few : what a pass per layer, side and candidate reads."""

    name: str
    protocol: Protocol
    few: Protocol

    @property
    def path(self):
        return weights.find(self.name)

    def text(self):
        """(token ids, what they are): the bundled text, in this model's words."""
        ids, smollm2 = bundled_tokens(), MODELS["smollm2"]
        if self is smollm2:
            return ids, "kvq/data/austen_tokens.npy"
        text = tokenizer(open_gguf(smollm2.path)).decode(ids.tolist())
        what = "what kvq/data/austen_tokens.npy holds, cut by this model's tokenizer"
        return tokenizer(open_gguf(self.path)).encode(text).ids, what

    @property
    def bos(self):
        return bos_token(open_gguf(self.path))


MODELS = {
    "smollm2": Model("smollm2-135m", Protocol(1024, 256, 3), Protocol(512, 128, 1)),
    "gemma3": Model("gemma-3-270m", Protocol(1024, 512, 2), Protocol(512, 256, 1)),
}


def describe(path, record, text):
    """Say in a finished table's header how it is made and of what text."""
    rows, header = read_table(path)
    header["text"] = text
    header["command"] = f"python figures/quality.py {record}"
    write_table(path, rows, header)


# --- tables of policies ---------------------------------------------------------------
def measure(kind, name, policies):
    model, out = MODELS[name], DATA / f"{kind}_{name}.csv"
    tokens, text = model.text()
    options = {"bos": model.bos, "out": out, "progress": True}
    evaluate(model.path, tokens, policies, model.protocol, **options)
    describe(out, f"{kind}_{name}", text)


# --- scales that know later tokens ----------------------------------------------------
@dataclass(frozen=True, eq=False)
class WholeWindow(decoder.Decoder):
    """A decoder that quantizes all tokens of a window at once, before any is read.

    So a group of tokens has one scale for the queries within it, too: a scale that
    knows tokens which those queries have yet to produce.
    """

    policy: Policy

    def heads(self, i, x, positions):
        h = super().heads(i, x, positions)
        k, v = (
            quantize(a, scheme).dequantize()
            for a, scheme in zip((h.k, h.v), self.policy.schemes, strict=True)
        )
        return replace(h, k=k, v=v)


def protocol(name="kivi-2:residual=0"):
    """The same policy: as a cache grows, and with all tokens quantized at once."""
    model = MODELS["smollm2"]
    decoder.CHUNK = model.protocol.window  # a window is one chunk
    tokens, text = model.text()
    windows, start = model.protocol.windows(tokens), model.protocol.start
    plain, policy = load(model.path), parse_policy(name)
    at_once = WholeWindow(**vars(plain), policy=policy)
    ways = {"as it grows": (plain, policy), "all at once": (at_once, "fp32")}
    points = {way: [] for way in ways}
    for window in windows:
        exact, _ = hidden_states(plain, window, start, "fp32", "float32")
        for way, (reader, policies) in ways.items():
            hidden, _ = hidden_states(reader, window, start, policies)
            point = compare(plain, exact, hidden, window[start + 1 :])
            points[way].append(point | {"bits": 3.0})
    rows = [{"quantized": way} | summary(name, points[way]) for way in ways]
    for row in rows:
        del row["bits_per_element"]
    facts = setup(model.path, windows, model.protocol) | {"text": text}
    facts |= provenance("python figures/quality.py protocol")
    write_table(DATA / "protocol_smollm2.csv", rows, facts)


# --- position by position -------------------------------------------------------------
POSITIONS = {
    "int8_token": "int8-token",
    "int4_token_g64": "int4-token-g64",
    "int4_token_g32_asym": "int4-token-g32-asym",
    "kivi_4": "kivi-4",
    "kivi_2": "kivi-2",
}


def positions():
    """-ln p of every scored token, to four decimals: exact, and by policy."""
    model = MODELS["smollm2"]
    tokens, text = model.text()
    windows, start = model.protocol.windows(tokens), model.protocol.start
    reader, rows = load(model.path), []
    for n, window in enumerate(windows):
        exact, _ = hidden_states(reader, window, start, "fp32", "float32")
        columns = {"exact": exact}
        for column, name in POSITIONS.items():
            columns[column], _ = hidden_states(reader, window, start, name)
        nll = {
            column: compare(reader, exact, hidden, window[start + 1 :])["nll"].round(4)
            for column, hidden in columns.items()
        }
        for i in range(len(exact)):
            values = {column: float(x[i]) for column, x in nll.items()}
            rows.append({"window": n, "position": start + i} | values)
    facts = setup(model.path, windows, model.protocol) | {"text": text}
    facts |= provenance("python figures/quality.py positions")
    write_table(DATA / "positions_smollm2.csv", rows, facts)


# --- layers ---------------------------------------------------------------------------
def candidates(name):
    return [parse_policy(f"{c}:residual=32") for c in CANDIDATES[name]]


def sensitivity(name):
    model, out = MODELS[name], DATA / f"sensitivity_{name}.csv"
    tokens, text = model.text()
    options = {"bos": model.bos, "out": out, "progress": True}
    sensitivities(model.path, tokens, candidates(name), model.few, **options)
    describe(out, f"sensitivity_{name}", text)


def search():
    """Choices for several budgets, and each candidate everywhere: measured twice.

    kl_few : on the tokens of the sensitivities, to hold against predicted_kl; the
    other columns on all tokens of the protocol, most of which the choice never saw.
    """
    model = MODELS["smollm2"]
    tokens, text = model.text()
    rows, _ = read_table(DATA / "sensitivity_smollm2.csv")
    problem = Search.of(rows, candidates("smollm2"), model.few.window)
    front = problem.solve()
    todo = {}
    for c, (bits, kl) in zip(problem.candidates, problem.uniform(), strict=True):
        todo[c.name] = float(bits), float(kl), c
    for budget in BUDGETS:
        n = problem.within(front, bits=budget)
        chosen = problem.policies(front.choice(n), f"{budget} bits, chosen")
        todo[chosen.name] = float(problem.bits(front.cost[n])), front.loss[n], chosen
    policies = {name: p for name, (_, _, p) in todo.items()}
    few = evaluate(model.path, tokens, policies, model.few, progress=True)
    all_ = evaluate(model.path, tokens, policies, model.protocol, progress=True)
    table = [
        {"policy": row["policy"], "bits": todo[row["policy"]][0]}
        | {"predicted_kl": float(todo[row["policy"]][1]), "kl_few": short["kl"]}
        | {key: value for key, value in row.items() if key != "policy"}
        for short, row in zip(few, all_, strict=True)
    ]
    windows = model.protocol.windows(tokens)
    facts = setup(model.path, windows, model.protocol) | {"text": text}
    facts |= provenance("python figures/quality.py search")
    write_table(DATA / "search_smollm2.csv", table, facts)


RECORDS = {
    "quality_smollm2": lambda: measure("quality", "smollm2", POLICIES),
    "quality_gemma3": lambda: measure("quality", "gemma3", POLICIES),
    "rotation_smollm2": lambda: measure("rotation", "smollm2", BOTH_SIDES | ONE_SIDE),
    "rotation_gemma3": lambda: measure("rotation", "gemma3", BOTH_SIDES),
    "protocol": protocol,
    "positions": positions,
    "sensitivity_smollm2": lambda: sensitivity("smollm2"),
    "sensitivity_gemma3": lambda: sensitivity("gemma3"),
    "search": search,
}


def main(names):
    unknown = [name for name in names if name not in RECORDS]
    if unknown:
        print(f"unknown {unknown[0]!r}; valid: {', '.join(RECORDS)}", file=sys.stderr)
        return 2
    for name in names or RECORDS:
        RECORDS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

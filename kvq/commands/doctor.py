"""`kvq doctor`: what this machine has and can run."""

from kvq.commands.common import print_json


def add(commands):
    p = commands.add_parser("doctor", help="what this machine has and can run")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=doctor)


def doctor(options):
    """Print versions, processor, GPU (or why none) and which backends can run."""
    from kvq.doctor import examine, lines

    report = examine()
    if options.json:
        print_json(report)
    else:
        print(*lines(report), sep="\n")

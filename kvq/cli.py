"""The `kvq` command: its grammar and its exit codes.

Each command is a module of `kvq.commands`. Results go to stdout, everything else to
stderr. Exit codes: 0; 2 with one line for wrong input; 130 after Ctrl-C. Heavy imports
happen inside the commands.
"""

import os
import sys

from kvq.commands import (
    bench,
    doctor,
    formats,
    kernels,
    lessons,
    plan,
    presets,
    study,
)
from kvq.commands.common import Parser, note
from kvq.model.commands import add_commands as add_model

ADD = (
    plan.add,
    study.add,
    presets.add,
    formats.add_formats,
    formats.add_convert,
    add_model,
    kernels.add,
    bench.add,
    lessons.add,
    doctor.add,
)
EXTRAS = dict.fromkeys(("joblib", "matplotlib", "safetensors", "tqdm"), "[study]")
EXTRAS |= dict.fromkeys(("gguf", "tokenizers"), "[model]")


def parser():
    """The command line's grammar."""
    from kvq import __version__

    p = Parser(prog="kvq", description="KV-cache quantization: plan, study, learn.")
    p.add_argument("--version", action="version", version=f"kvq {__version__}")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in ADD:
        add(commands)
    return p


def main(argv=None):
    """Run the command line `argv` (default: sys.argv). Returns the exit code."""
    try:
        options = parser().parse_args(argv)
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(package)
        remedy = f"kvq-reference{extra}" if extra else package
        return _fail(f"{error}: pip install '{remedy}'" if package else error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except ValueError as error:
        return _fail(error)
    return 0


def _fail(error):
    """One line on stderr. Returns 2."""
    note("kvq: error: " + " ".join(str(error).split()))
    return 2

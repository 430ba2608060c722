"""What the lessons ask of the kernels: a piece of source, and what a run counts."""

from pathlib import Path

from kvq.kernels.host import operation

KERNELS = Path(__file__).resolve().parent
LANGUAGES = ("c", "numba")


def excerpt(file, start):
    """The piece of `file` that begins with the first line that contains `start`.

    It ends before an empty line that is followed by one indented no deeper than it.
    file : relative to this folder, "pack/v1_word_per_thread.cu".
    Raises ValueError where no line contains `start`.
    """
    lines = (KERNELS / file).read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if start in line), None)
    if first is None:
        raise ValueError(f"no line of {file} contains {start!r}")
    last = first + 1
    while last < len(lines) and not _ends(lines, last, _indent(lines[first])):
        last += 1
    return "\n".join(lines[first:last])


def _ends(lines, i, indent):
    """Whether line i is empty and what follows is indented no deeper."""
    following = next((line for line in lines[i:] if line.strip()), "")
    return not lines[i].strip() and _indent(following) <= indent


def _indent(line):
    return len(line) - len(line.lstrip())


def run(op, version, *inputs, language="c", check=True, **options):
    """An operation by one version of its kernels, on the PTX machine.

    op : "pack", "dequant" or "decode"; inputs and options as its backend takes them.
    Returns (result, reports): one `ptxsim.Report` of each kernel that ran.
    Raises ValueError for another language, or for what the version does not know.
    """
    from kvq.kernels.launch import ptxsim

    if language not in LANGUAGES:
        raise ValueError(f"language={language!r}; valid: {', '.join(LANGUAGES)}")
    launches, collect = operation(op).launches(*inputs, version, **options)
    reports = ptxsim.run(launches, language, check)
    return collect(), reports

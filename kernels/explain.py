"""A kernel's source with what was counted beside each line: as text, and as a page.

    lines = source_lines(report.run(case))
    summary(lines)    the worst lines, in words
    text(lines)       for the terminal: the lines that ran
    page(title, lines)    HTML, the whole source, nothing loaded from elsewhere

An inlined function counts where it stands, not where it is called.
"""

import html
from dataclasses import dataclass
from pathlib import Path

from kvq.kernels.ptxsim import LineCounts

KERNELS = Path(__file__).resolve().parent
TITLES = ("instructions", "sectors", "/ ideal", "wavefronts", "/ ideal", "divergent")

ELSEWHERE = "CUDA's headers, and what has no line"


@dataclass(frozen=True)
class Line:
    """One line of source. counts : LineCounts, or None where nothing was executed.
    share : of all instructions of the kernels."""

    file: str
    number: int
    text: str
    counts: LineCounts | None = None
    share: float = 0.0

    @property
    def excess(self):
        """Sectors and wavefronts above the ideal."""
        c = self.counts
        return c.sectors - c.ideal_sectors + c.wavefronts - c.ideal_wavefronts

    @property
    def cells(self):
        """One text for each of TITLES."""
        c = self.counts
        if c is None:
            return ("",) * len(TITLES)
        return (
            f"{100 * self.share:.1f} %",
            *_count(c.sectors, c.ideal_sectors),
            *_count(c.wavefronts, c.ideal_wavefronts),
            f"{c.divergent:,}" if c.divergent else "",
        )


def _count(count, ideal):
    return (f"{count:,}", f"{count / ideal:.2f}") if ideal else ("", "")


def source_lines(runs):
    """[Line] of every file that the kernels of `runs` (see `report.run`) come from."""
    places = {}
    for run in runs:
        for place, counts in run.report.places.items():
            if counts.instructions:
                places[place] = _sum(places.get(place, LineCounts()), counts)
    total = sum(counts.instructions for counts in places.values())
    files = dict.fromkeys(f for f, _ in places if f and (KERNELS / f).is_file())
    return [
        Line(file, number, text, counts, counts.instructions / total if counts else 0)
        for file in files
        for number, text in enumerate(_source(file), 1)
        for counts in [places.get((file, number))]
    ]


def _sum(a, b):
    return LineCounts(
        **{name: value + getattr(b, name) for name, value in vars(a).items()}
    )


def _source(file):
    return (KERNELS / file).read_text(encoding="utf-8").splitlines()


def summary(lines, most=5):
    """The lines that waste most, then those that cost most: one text for each."""
    ran = [line for line in lines if line.counts]
    ran.sort(key=lambda line: (-line.excess, -line.share))
    return [f"{x.file}:{x.number}  {_remark(x)}  {x.text.strip()}" for x in ran[:most]]


def _remark(line):
    share = f"{100 * line.share:.1f} % of the instructions"
    return ", ".join([share, *waste(line.counts)]) + ":"


def waste(counts):
    """What is not ideal in LineCounts, in words."""
    for what in ("sectors", "wavefronts"):
        count, ideal = getattr(counts, what), getattr(counts, f"ideal_{what}")
        if count > ideal:
            yield f"{count / ideal:.2f} x the ideal {what}"
    if counts.divergent:
        yield f"divergent branches: {counts.divergent:,}"


# --- text -----------------------------------------------------------------------------
def text(lines):
    """Rows of text for a table: the lines that ran, "..." for what lies between."""
    yield [*TITLES, "line", "source"]
    last = None
    for line in lines:
        if line.counts is None:
            continue
        if last is None or last.file != line.file:
            yield [*[""] * len(TITLES), "", line.file]
        elif line.number > last.number + 1:
            yield [*[""] * len(TITLES), "", "..."]
        yield [*line.cells, str(line.number), line.text]
        last = line
    rest = 1 - sum(line.share for line in lines)
    yield [f"{100 * rest:.1f} %", *[""] * len(TITLES), ELSEWHERE]


# --- a page ---------------------------------------------------------------------------
STYLE = """
body { margin: 2em; background: #fff; color: #111; font: 15px/1.4 sans-serif; }
table { border-collapse: collapse; font: 13px/1.35 monospace; }
th { position: sticky; top: 0; background: #fff; text-align: right; padding: 4px 8px; }
td { padding: 0 8px; text-align: right; white-space: pre; }
td:last-child, th:last-child { text-align: left; }
tr.file td { font-weight: bold; padding-top: 1.5em; }
"""
LEGEND = (
    "Counted on a simulator of PTX: no times. Blue: a share of the instructions; "
    "orange: above the ideal. Sectors are 32-byte pieces of global memory, wavefronts "
    "are passes over the banks of shared memory. An inlined function counts where it "
    "stands."
)


def page(title, lines):
    """A self-contained HTML page: the worst lines, then the whole source."""
    title = html.escape(title)
    items = "".join(f"<li><code>{html.escape(s)}</code></li>" for s in summary(lines))
    heads = "".join(f"<th>{t}</th>" for t in (*TITLES, "line", "source"))
    body = "\n".join(_rows(lines))
    return (
        '<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>\n<p>{LEGEND}</p>\n"
        f"<h2>The worst lines</h2>\n<ol>{items}</ol>\n"
        f"<table><thead><tr>{heads}</tr></thead>\n{body}\n</table></html>\n"
    )


def _rows(lines):
    most = max((line.share for line in lines), default=0) or 1
    file = None
    for line in lines:
        if line.file != file:
            file = line.file
            span = len(TITLES) + 1
            yield f'<tr class="file"><td colspan="{span}"><td>{html.escape(file)}</tr>'
        cells = zip(line.cells, _colours(line, most), strict=True)
        row = "".join(f"<td{colour}>{cell}</td>" for cell, colour in cells)
        source = html.escape(line.text)
        yield f"<tr>{row}<td>{line.number}</td><td>{source}</td></tr>"
    rest = 1 - sum(line.share for line in lines)
    yield f'<tr><td>{100 * rest:.1f} %<td colspan="{span}"><td>{ELSEWHERE}</tr>'


def _colours(line, most):
    """The style of each of the line's cells."""
    c = line.counts
    if c is None:
        return ("",) * len(TITLES)
    sectors, wavefronts = c.sectors > c.ideal_sectors, c.wavefronts > c.ideal_wavefronts
    shares = (line.share / most, 0, sectors, 0, wavefronts, 0)
    rgb = ("0,114,178", *["230,159,0"] * 5)
    return [
        f' style="background:rgba({colour},{0.5 * share:.2f})"' if share else ""
        for colour, share in zip(rgb, shares, strict=True)
    ]

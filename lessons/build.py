"""One source per lesson: its two notebooks, their execution, the HTML pages.

    python lessons/build.py notebooks    src/NN_topic.py -> the two notebooks
    python lessons/build.py check        fail if a notebook is not what its source gives
    python lessons/build.py run [NAME]   execute the solutions, into executed/
    python lessons/build.py html         executed/ -> html/, with an index

A source is a Python file in jupytext's py:percent format. What a learner writes
stands in a region, `# BEGIN SOLUTION (2 lines)` to `# END SOLUTION`. The exercise
notebook `NN_topic.ipynb` gets a blank to fill in there, the solution notebook
`solutions/NN_topic.ipynb` gets the lines. Both are generated, never edited.
"""

import argparse
import asyncio
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
LESSON = "[0-9][0-9]_*"
CELL_TIMEOUT = 120  # seconds
INLINE = "module://matplotlib_inline.backend_inline"
BEGIN = re.compile(r"(\s*)# BEGIN SOLUTION \((\d+) lines?\)")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


# Source -> notebooks


def split(text, name):
    """The exercise and the solution that a source holds, as two texts.

    Raises ValueError naming `name` and the line of a misplaced or misspelt marker.
    """
    exercise, solution, opened = [], [], 0
    for number, line in enumerate(text.splitlines(), 1):
        begin = BEGIN.fullmatch(line.rstrip())
        end = line.strip() == "# END SOLUTION"
        problem = _marker_problem(line, begin, end, opened)
        if problem:
            raise ValueError(f"{name}:{number}: {problem}")
        if begin:
            opened = number
            exercise += _blank(indent=begin[1], lines=int(begin[2]))
        elif end:
            opened = 0
        else:
            solution.append(line)
            if not opened:
                exercise.append(line)
    if opened:
        raise ValueError(f"{name}:{opened}: BEGIN SOLUTION without END SOLUTION")
    return "\n".join(exercise) + "\n", "\n".join(solution) + "\n"


def _marker_problem(line, begin, end, opened):
    if begin and opened:
        return f"BEGIN SOLUTION inside the one of line {opened}"
    if end and not opened:
        return "END SOLUTION without BEGIN SOLUTION"
    if line.startswith("# %%") and opened:
        return f"a new cell before the END SOLUTION of line {opened}"
    if re.search("(BEGIN|END) SOLUTION", line) and not (begin or end):
        return "valid markers: '# BEGIN SOLUTION (2 lines)' and '# END SOLUTION'"
    return None


def _blank(indent, lines):
    return [
        f"{indent}# FILL ME IN (roughly {lines} line{'s' if lines > 1 else ''})",
        f'{indent}raise NotImplementedError("fill me in")',
    ]


def to_notebook(text):
    """A notebook without outputs; the same text always gives the same bytes."""
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"c{i:03d}"  # jupytext's own ids are random
        cell.metadata = nbformat.NotebookNode()
    return notebook


def to_json(notebook):
    """Canonical text: sorted keys, one space of indent, a newline at the end."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def sources(folder):
    """The lesson sources, in order. Raises ValueError where there is none."""
    found = sorted((folder / "src").glob(f"{LESSON}.py"))
    if not found:
        raise ValueError(f"no lesson source {LESSON}.py in {folder / 'src'}")
    return found


def generate(folder):
    """{path: text} of every notebook that the sources give."""
    notebooks = {}
    for source in sources(folder):
        exercise, solution = split(source.read_text(encoding="utf-8"), source.name)
        # A solution lies one folder deeper: its links take one more step up.
        solution = solution.replace("](../", "](../../")
        name = f"{source.stem}.ipynb"
        notebooks[folder / name] = to_json(to_notebook(exercise))
        notebooks[folder / "solutions" / name] = to_json(to_notebook(solution))
    return notebooks


def drift(folder):
    """The notebooks that are missing, out of date, or without a source."""
    wanted = generate(folder)
    found = {
        path: path.read_text(encoding="utf-8")
        for part in (folder, folder / "solutions")
        for path in part.glob(f"{LESSON}.ipynb")
    }
    return sorted(p for p in wanted | found if wanted.get(p) != found.get(p))


def notebooks(folder):
    """Write what drifted; remove notebooks without a source."""
    wanted = generate(folder)
    for path in drift(folder):
        path.parent.mkdir(exist_ok=True)
        if path in wanted:
            path.write_text(wanted[path], encoding="utf-8", newline="\n")
        else:
            path.unlink()
        print("wrote" if path in wanted else "removed", path.relative_to(folder))
    return 0


def check(folder):
    """Print each notebook that drifted. Exit code 1 if there is one."""
    drifted = drift(folder)
    for path in drifted:
        print(f"{path.relative_to(folder)} differs from its source", file=sys.stderr)
    if drifted:
        print("run `make notebooks` and commit the result", file=sys.stderr)
    return int(bool(drifted))


# Notebooks -> executed notebooks


def execute(path):
    """The executed notebook of `path`, and what went wrong ("" if nothing did).

    Runs in the notebook's own folder. A cell may take `CELL_TIMEOUT` seconds.
    """
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellExecutionError,
        CellTimeoutError,
        DeadKernelError,
    )

    notebook = nbformat.read(path, as_version=4)
    started = []
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # no word about plain local sockets
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: started.append(cell),
    )
    try:
        # The pages show the figures, whatever backend the caller's MPLBACKEND names.
        # Lessons run side by side: more BLAS threads than cores would slow all of them.
        environment = {**os.environ, "MPLBACKEND": INLINE, "OPENBLAS_NUM_THREADS": "1"}
        asyncio.run(client.async_execute(env=environment))
    except (CellExecutionError, CellTimeoutError, DeadKernelError, NoSuchKernel) as e:
        return notebook, _failure(started, e)
    return notebook, ""


def _failure(started, error):
    """The cell that failed, its outputs and the error, as text."""
    if not started:
        return f"{type(error).__name__}: {error}"
    outputs = "\n".join(map(_output_text, started[-1].get("outputs", [])))
    kind = getattr(error, "ename", type(error).__name__)
    value = getattr(error, "evalue", "") or str(error).strip().partition("\n")[0]
    return f"{started[-1].source}\n----- outputs\n{outputs}\n----- {kind}: {value}"


def _output_text(output):
    text = output.get("text") or "\n".join(output.get("traceback", []))
    text = text or output.get("data", {}).get("text/plain", "")
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()


def run(folder, names, jobs):
    """Execute the solutions called `names` (all of them if empty) into executed/.

    One line per lesson as it ends; then what failed. Exit code 1 if one did.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}; valid: an integer >= 1")
    paths = _pick(folder, names)
    target = folder / "executed"
    target.mkdir(exist_ok=True)
    failures = {}

    def one(path):
        (target / path.name).unlink(missing_ok=True)
        start = time.perf_counter()
        notebook, failure = execute(path)
        seconds = time.perf_counter() - start
        if failure:
            failures[path.stem] = failure
        else:
            nbformat.write(notebook, target / path.name)
        state = "FAILED" if failure else "ok"
        print(f"{path.stem:<32} {seconds:6.1f} s  {state}", flush=True)

    print(f"Lessons to run: {len(paths)}, {jobs} at a time", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, paths))
    for name, failure in failures.items():
        print(f"\n===== {name} failed in this cell:\n{failure}", file=sys.stderr)
    return int(bool(failures))


def _pick(folder, names):
    """Solution paths of the lessons called `names`. Raises ValueError."""
    found = {p.stem: p for p in sorted((folder / "solutions").glob(f"{LESSON}.ipynb"))}
    if not found:
        raise ValueError("no solution notebook: run `make notebooks` first")
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no lesson {unknown[0]!r}; valid: {', '.join(found)}")
    return [found[name] for name in names or found]


# Executed notebooks -> HTML

# nbconvert's page loads scripts from the network. Equations become MathML here, which
# browsers draw by themselves, so that the pages need none of them.
PAGE = """{%- extends "lab/index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}
<style>
  body { background: white; }
  main { max-width: 60rem; margin: 0 auto; }
  nav a { color: #0b57a4; text-decoration: underline; font: 1rem sans-serif; }
  math[display="block"] { margin: 0.8em 0; }
</style>
{%- endblock -%}
{%- block body_header -%}{{ super() }}
<nav><a href="index.html">All lessons</a></nav>
{%- endblock -%}
"""

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>KV-cache quantization: the lessons</title>
<style>
  body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; background: white;
         color: #222; font: 1.05rem/1.5 system-ui, sans-serif; }}
  a {{ color: #0b57a4; }}
  article {{ display: flex; gap: 1.5rem; align-items: center; padding: 1rem 0;
            border-top: 1px solid #ddd; }}
  article > div {{ flex: 1; }}
  h2 {{ margin: 0 0 0.3rem; font-size: 1.25rem; }}
  p {{ margin: 0.3rem 0; }}
  img {{ width: 18rem; max-height: 12rem; object-fit: contain; }}
  footer {{ border-top: 1px solid #ddd; padding-top: 1rem; color: #555; }}
  @media (max-width: 40rem) {{ article {{ flex-direction: column; }} }}
</style>
</head>
<body>
<h1>KV-cache quantization: the lessons</h1>
<p>These pages are the solved lessons, as they ran on this machine. To work through
one yourself, open its notebook in <code>lessons/</code> with JupyterLab.</p>
{entries}
<footer><p>Pages, pictures and equations need no network. Equations are MathML: Firefox,
Safari, and Chrome or Edge from version 109 draw them.</p></footer>
</body>
</html>
"""

ENTRY = """<article>
<div><h2><a href="{stem}.html">{title}</a></h2>
{summary}
<p><code>lessons/{stem}.ipynb</code></p></div>
{picture}
</article>"""


def mathml(tex, display="inline"):
    """An equation as MathML. Raises ValueError for TeX that cannot be converted."""
    from latex2mathml.converter import convert

    # GitHub draws `aligned` and `split` alike; the converter knows only the second.
    known = re.sub(r"(begin|end)\{aligned\}", r"\1{split}", tex)
    try:
        code = convert(known, display=display)
    except Exception as error:  # each of its faults has a class of its own
        raise ValueError(f"not an equation: {tex.strip()}") from error
    if "\\" in code or ">&<" in code:
        raise ValueError(f"cannot convert this equation to MathML: {tex.strip()}")
    return code


def render_markdown(text, root):
    """HTML of a Markdown cell; pictures below the folder `root` are embedded."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body):
            return mathml(body)

        def block_math(self, body):
            return mathml(body, display="block")

    renderer = Renderer(
        escape=False, embed_images=True, exclude_anchor_links=True, path=str(root)
    )
    text = re.sub(r"\]\((\.\./)+figures/", "](figures/", text)
    return MarkdownWithMath(renderer=renderer).render(text)


def describe(notebook):
    """(title, summary, picture) as Markdown, from the first cell of a lesson.

    The first heading, the first paragraph after it, the first picture.
    """
    text = notebook.cells[0].source
    title = re.search(r"^# (.+)$", text, re.M)
    if notebook.cells[0].cell_type != "markdown" or not title:
        raise ValueError("a lesson begins with a Markdown cell and its '# Title'")
    blocks = [b.strip() for b in re.split(r"\n\s*\n", text[title.end() :]) if b.strip()]
    prose = [b for b in blocks if not b.startswith(("!", "#", "|", "$", "<"))]
    picture = re.search(r"!\[.*?\]\(.*?\)", text, re.S)
    return title[1], (prose or [""])[0], picture[0] if picture else ""


def html(folder):
    """Write a page per executed lesson and index.html into html/."""
    paths = sorted((folder / "executed").glob(f"{LESSON}.ipynb"))
    if not paths:
        raise ValueError("no lesson has run: run `python lessons/build.py run` first")
    target = folder / "html"
    target.mkdir(exist_ok=True)
    entries = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        page = _page(notebook, folder.parent)
        (target / f"{path.stem}.html").write_text(page, encoding="utf-8")
        entries.append(_entry(path.stem, notebook, folder.parent))
    index = target / "index.html"
    index.write_text(INDEX.format(entries="\n".join(entries)), encoding="utf-8")
    print(f"Lessons: {len(paths)}. Open in a browser: {index}")
    return 0


def _page(notebook, root):
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        raw_template=PAGE,
        filters={"markdown2html": lambda text: render_markdown(text, root)},
    )
    title = describe(notebook)[0]
    resources = {"metadata": {"name": title, "path": str(root)}}
    return exporter.from_notebook_node(notebook, resources)[0]


def _entry(stem, notebook, root):
    title, summary, picture = describe(notebook)
    return ENTRY.format(
        stem=stem,
        title=_inline(title, root),
        summary=render_markdown(summary, root),
        picture=render_markdown(picture, root) or _first_picture(notebook),
    )


def _inline(text, root):
    return render_markdown(text, root).strip().removeprefix("<p>").removesuffix("</p>")


def _first_picture(notebook):
    """The first PNG among the outputs, for a lesson without a picture at its top."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            png = output.get("data", {}).get("image/png")
            if png:
                return f'<img alt="" src="data:image/png;base64,{png.strip()}">'
    return ""


# Command line


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Build the lessons.", prog="python lessons/build.py"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=HERE,
        help="where src/ lies",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("notebooks", help="write the notebooks from src/")
    commands.add_parser("check", help="fail if a notebook differs from its source")
    runner = commands.add_parser("run", help="execute the solutions into executed/")
    runner.add_argument("names", nargs="*", help="lessons, such as 00_start_here")
    runner.add_argument("--jobs", type=int, default=2, help="lessons at a time")
    commands.add_parser("html", help="executed/ -> html/ with an index")
    options = vars(parser.parse_args(argv))
    command = {"notebooks": notebooks, "check": check, "run": run, "html": html}[
        options.pop("command")
    ]
    try:
        return command(**options)
    except ValueError as error:
        print(f"lessons: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

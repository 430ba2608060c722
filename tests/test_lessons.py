"""The lessons: notebooks as their sources give them; solutions run, exercises wait."""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

LESSONS = Path(__file__).resolve().parents[1] / "lessons"

spec = importlib.util.spec_from_file_location("lessons_build", LESSONS / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

NAMES = [source.stem for source in build.sources(LESSONS)]
lesson = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def executed():
    """{path of a notebook: its future (executed notebook, failure)}, two at a time."""
    paths = [LESSONS / part / f"{n}.ipynb" for n in NAMES for part in ("solutions", "")]
    with ThreadPoolExecutor(2) as pool:
        yield {path: pool.submit(build.execute, path) for path in paths}
        pool.shutdown(cancel_futures=True)


def solution(name):
    return LESSONS / "solutions" / f"{name}.ipynb"


def exercise(name):
    return LESSONS / f"{name}.ipynb"


def markdown(path):
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def test_notebooks_are_what_the_sources_give():
    drifted = [str(path.relative_to(LESSONS)) for path in build.drift(LESSONS)]
    assert not drifted, "run `make notebooks`"


@lesson
def test_solution_runs_without_error_or_warning(name, executed):
    notebook, failure = executed[solution(name)].result()
    assert not failure, failure
    errors = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr" and "Warning" in output.text
    ]
    assert not errors


@lesson
def test_exercise_waits_at_its_first_blank(name, executed):
    _, failure = executed[exercise(name)].result()
    assert failure.endswith("----- NotImplementedError: fill me in"), failure


@lesson
def test_lesson_does_not_name_a_lesson_by_number(name):
    for text in (path.read_text() for path in (exercise(name), solution(name))):
        assert not re.search(r"\b\d\d_[a-z]", text)
        assert not re.search(r"\b[Ll]esson \d", text)


@lesson
@pytest.mark.parametrize("notebook", [exercise, solution])
def test_links_lead_somewhere(name, notebook):
    path = notebook(name)
    links = re.findall(r"\]\(([^)\s]+)", "\n".join(markdown(path)))
    relative = [link for link in links if "://" not in link and link[0] != "#"]
    missing = [link for link in relative if not (path.parent / link).exists()]
    assert not missing


@lesson
def test_first_cell_has_title_and_summary_and_equations_can_be_drawn(name):
    path = solution(name)
    title, summary, _ = build.describe(nbformat.read(path, as_version=4))
    assert title
    assert summary
    for text in markdown(path):
        assert "$$" not in build.render_markdown(text, LESSONS.parent)


@lesson
def test_hint_tells_the_size_of_the_solution(name):
    source = (LESSONS / "src" / f"{name}.py").read_text(encoding="utf-8")
    region = re.compile(r"# BEGIN SOLUTION \((\d+) lines?\)\n(.*?)# END SOLUTION", re.S)
    for hint, body in region.findall(source):
        code = [s for s in body.splitlines() if s.strip() and s.strip()[0] != "#"]
        assert int(hint) == len(code), f"{hint} lines announced, {len(code)} written"


def test_readme_lists_the_lessons_in_order():
    table = (LESSONS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[[^]]+\]\((\d\d_\w+)\.ipynb\)", table, re.M) == NAMES

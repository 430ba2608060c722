"""The two builders, on tiny lessons and figures: lessons/build.py, figures/make.py."""

import importlib.util
import json
import re
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.parent.name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load(Path("lessons/build.py"))

TINY = r'''
# %% [markdown]
# # A tiny *lesson*
#
# How large is the step $s$ of `x`?
#
# ![A point](../figures/point.png)
#
# $$
# s = \max_i |x_i| / (2^{b-1} - 1)
# $$

# %%
import matplotlib.pyplot as plt


def step(x, bits):
    """The scale of one group."""
    # BEGIN SOLUTION (2 lines)
    largest = max(abs(value) for value in x)
    return largest / (2 ** (bits - 1) - 1)
    # END SOLUTION


# %%
print("step", step([1.0, -14.0], 4))
plt.plot([1, 2])
plt.show()
'''

# The smallest PNG: one grey point.
POINT = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c636a000000820081dd436af40000000049454e44ae426082"
)


@pytest.fixture
def folder(tmp_path):
    """A lessons folder with one source, beside a figures folder."""
    (tmp_path / "lessons" / "src").mkdir(parents=True)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "point.png").write_bytes(POINT)
    write_lesson(tmp_path / "lessons", TINY)
    return tmp_path / "lessons"


def write_lesson(folder, text, name="10_tiny"):
    path = folder / "src" / f"{name}.py"
    path.write_text(text.lstrip("\n"), encoding="utf-8")


def lessons(folder, *arguments):
    return build.main(["--folder", str(folder), *arguments])


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


# Notebooks


def test_exercise_has_a_blank_where_the_solution_has_the_lines(folder):
    assert lessons(folder, "notebooks") == 0
    exercise = "".join(cells(folder / "10_tiny.ipynb")[1]["source"])
    solution = "".join(cells(folder / "solutions" / "10_tiny.ipynb")[1]["source"])
    assert exercise.endswith(
        '    """The scale of one group."""\n'
        "    # FILL ME IN (roughly 2 lines)\n"
        '    raise NotImplementedError("fill me in")'
    )
    assert "largest = max(" in solution
    assert "SOLUTION" not in exercise + solution


def test_one_line_is_not_called_lines():
    text = "# BEGIN SOLUTION (1 line)\na = 1\n# END SOLUTION\n"
    exercise, solution = build.split(text, "x.py")
    assert exercise.startswith("# FILL ME IN (roughly 1 line)\n")
    assert solution == "a = 1\n"


def test_links_of_the_solution_take_one_more_step_up(folder):
    lessons(folder, "notebooks")
    exercise, solution = folder / "10_tiny.ipynb", folder / "solutions/10_tiny.ipynb"
    assert "](../figures/point.png)" in "".join(cells(exercise)[0]["source"])
    assert "](../../figures/point.png)" in "".join(cells(solution)[0]["source"])


def test_notebooks_are_canonical_and_the_same_bytes_each_time(folder):
    lessons(folder, "notebooks")
    paths = [folder / "10_tiny.ipynb", folder / "solutions" / "10_tiny.ipynb"]
    first = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    lessons(folder, "notebooks")
    assert [path.read_bytes() for path in paths] == first
    for text in first:
        notebook = json.loads(text)
        canonical = json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False)
        assert text.decode() == canonical + "\n"
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        assert [c["id"] for c in notebook["cells"]] == ["c000", "c001", "c002"]
        assert not any(c.get("outputs") for c in notebook["cells"])


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        (["x = 1", "# BEGIN SOLUTION (1 line)", "x = 2"], 2, "without END SOLUTION"),
        (["x = 1", "# END SOLUTION"], 2, "END SOLUTION without BEGIN SOLUTION"),
        (["# BEGIN SOLUTION (1 line)"] * 2, 2, "inside the one of line 1"),
        (["# BEGIN SOLUTION (1 line)", "", "# %%"], 3, "a new cell before"),
        (["# BEGIN SOLUTION", "# END SOLUTION"], 1, "valid markers"),
        (["#BEGIN SOLUTION (1 line)"], 1, "valid markers"),
        (["x = 1  # END SOLUTION"], 1, "valid markers"),
    ],
)
def test_misplaced_marker_is_one_line_with_file_and_line(
    folder, capsys, lines, line, message
):
    write_lesson(folder, "\n".join(lines), "11_bad")
    assert lessons(folder, "notebooks") == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"lessons: 11_bad\.py:{line}: .*{message}.*\n", error)
    assert not (folder / "10_tiny.ipynb").exists()


def test_check_names_what_differs_from_the_source(folder, capsys):
    lessons(folder, "notebooks")
    assert lessons(folder, "check") == 0
    (folder / "12_gone.ipynb").write_text("{}", encoding="utf-8")
    (folder / "notes.ipynb").write_text("{}", encoding="utf-8")  # a reader's own
    solution = folder / "solutions" / "10_tiny.ipynb"
    solution.write_text(solution.read_text().replace("largest", "peak"))
    capsys.readouterr()
    assert lessons(folder, "check") == 1
    named = [line.split()[0] for line in capsys.readouterr().err.splitlines()[:-1]]
    assert named == ["12_gone.ipynb", "solutions/10_tiny.ipynb"]
    lessons(folder, "notebooks")
    assert lessons(folder, "check") == 0
    assert (folder / "notes.ipynb").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "99_none"], "no lesson '99_none'; valid: 10_tiny"),
        (["run", "--jobs", "0"], "jobs=0; valid: an integer >= 1"),
        (["html"], "no lesson has run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, arguments, message):
    lessons(folder, "notebooks")
    assert lessons(folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_folder_without_sources_is_exit_code_2(tmp_path, capsys):
    assert lessons(tmp_path, "notebooks") == 2
    assert "no lesson source" in capsys.readouterr().err


# Execution and pages


def test_solution_runs_and_becomes_a_page_that_needs_no_network(folder, capsys):
    lessons(folder, "notebooks")
    assert lessons(folder, "run") == 0
    assert re.search(r"^10_tiny +\d+\.\d s  ok$", capsys.readouterr().out, re.M)
    outputs = cells(folder / "executed" / "10_tiny.ipynb")[2]["outputs"]
    assert "step 2.0\n" in outputs[0]["text"]
    assert "image/png" in outputs[1]["data"]

    assert lessons(folder, "html") == 0
    page = (folder / "html" / "10_tiny.html").read_text(encoding="utf-8")
    index = (folder / "html" / "index.html").read_text(encoding="utf-8")
    for text in (page, index):
        assert not re.search(r"<(script|link)\b[^>]*(src|href)=", text)
        assert not re.search(r'<img[^>]*src="(?!data:)', text)
        assert "<math" in text
    assert re.search('<math[^>]* display="block"', page)
    assert '<a href="10_tiny.html">A tiny <em>lesson</em></a>' in index
    assert "How large is the step" in index
    assert index.count("data:image/png;base64,") == 1


def test_exercise_as_it_is_fails_with_not_implemented_error(folder):
    lessons(folder, "notebooks")
    _, failure = build.execute(folder / "10_tiny.ipynb")
    assert failure.endswith("----- NotImplementedError: fill me in")


def test_failing_cell_is_shown_with_its_outputs(folder, capsys):
    lessons(folder, "notebooks")
    lessons(folder, "run")
    write_lesson(folder, "# %%\nprint('so far')\nprint(1 / 0)\n")
    lessons(folder, "notebooks")
    assert lessons(folder, "run") == 1
    output = capsys.readouterr()
    assert re.search(r"^10_tiny .* FAILED$", output.out, re.M)
    assert "print(1 / 0)" in output.err
    assert "so far" in output.err
    assert "----- ZeroDivisionError: division by zero" in output.err
    assert not (folder / "executed" / "10_tiny.ipynb").exists()


def test_death_of_the_kernel_is_a_failure_within_a_minute(folder, capsys):
    write_lesson(
        folder, "# %%\nimport os\nprint('last words', flush=True)\nos._exit(1)\n"
    )
    lessons(folder, "notebooks")
    start = time.monotonic()
    assert lessons(folder, "run") == 1
    assert time.monotonic() - start < 60
    error = capsys.readouterr().err
    assert "os._exit(1)" in error
    assert "----- DeadKernelError: Kernel died" in error


def test_cell_that_never_ends_is_a_failure(folder, capsys, monkeypatch):
    monkeypatch.setattr(build, "CELL_TIMEOUT", 1)
    write_lesson(folder, "# %%\nimport time\ntime.sleep(60)\n")
    lessons(folder, "notebooks")
    assert lessons(folder, "run") == 1
    assert "----- CellTimeoutError" in capsys.readouterr().err


@pytest.mark.parametrize("tex", [r"\begin{foo} x", r"\unknown{x}", r"\left( x"])
def test_equation_that_cannot_be_drawn_is_refused(tex):
    with pytest.raises(ValueError, match="equation"):
        build.mathml(tex)


def test_aligned_equations_keep_their_columns():
    code = build.mathml(r"\begin{aligned} a &= b \\ c &= d \end{aligned}")
    assert code.count("<mtr>") == 2


# Figures

PLOT = '''
"""The error halves."""

NAME = "halving"
FACTOR = 1.0


def data():
    return [{"bits": b, "error": FACTOR * 2.0**-b, "axis": "token"} for b in (2, 3, 4)]


def draw(table, path_stem):
    import matplotlib.pyplot as plt

    from kvq import plots

    figure, axes = plt.subplots()
    axes.plot([row["bits"] for row in table], [row["error"] for row in table])
    plots.save(figure, path_stem)
'''


@pytest.fixture
def figures(tmp_path):
    """A figures folder with one plot script, and the command that makes it."""
    make = load(Path("figures/make.py"))
    script = tmp_path / "plot_halving.py"
    script.write_text(PLOT)

    def run(*arguments, factor="1.0"):
        script.write_text(PLOT.replace("FACTOR = 1.0", f"FACTOR = {factor}"))
        return make.main(["--folder", str(tmp_path), *arguments])

    run.folder = tmp_path
    return run


def test_figure_is_three_files_and_the_same_bytes_each_time(figures):
    names = ("data/halving.csv", "halving.svg", "halving.png")
    assert figures() == 0
    first = [(figures.folder / name).read_bytes() for name in names]
    assert b"# finding: The error halves." in first[0]
    assert figures() == 0
    assert [(figures.folder / name).read_bytes() for name in names] == first


def test_check_passes_on_last_digits_and_fails_on_a_changed_number(figures, capsys):
    figures()
    assert figures("--check", factor="1.0000001") == 0
    capsys.readouterr()
    assert figures("--check", factor="1.00001") == 1
    output = capsys.readouterr().out
    assert "DRIFT" in output
    assert "row 0, error: 0.25 recorded" in output


def test_check_fails_where_a_picture_is_missing(figures):
    figures()
    (figures.folder / "halving.svg").unlink()
    assert figures("--check") == 1


def test_last_digits_do_not_rewrite_the_recorded_data(figures):
    figures()
    recorded = (figures.folder / "data" / "halving.csv").read_bytes()
    figures(factor="1.0000001")
    assert (figures.folder / "data" / "halving.csv").read_bytes() == recorded
    figures(factor="1.5")
    assert (figures.folder / "data" / "halving.csv").read_bytes() != recorded


def test_unknown_figure_is_one_line_and_exit_code_2(figures, capsys):
    assert figures("doubling") == 2
    error = capsys.readouterr().err
    assert error == "figures: no figure 'doubling'; valid: halving\n"


# Requirements


def requirements(lines):
    """{package: lower bound} of requirement lines; comments and markers dropped."""
    found = {}
    for line in lines:
        name, _, bound = line.partition("#")[0].partition(";")[0].partition(">=")
        if name.strip():
            found[name.strip()] = bound.partition(",")[0].strip()
    return found


def test_requirements_agree_with_the_extras_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = requirements(project["dependencies"] + extras["study"] + extras["lessons"])
    given = requirements((ROOT / "requirements.txt").read_text().splitlines())
    assert {name: given.get(name) for name in wanted} == wanted


def test_makefile_help_describes_every_target():
    text = (ROOT / "Makefile").read_text()
    text = text.replace("\\\n", " ")
    targets = re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()
    assert re.findall(r"^([a-z-]+):.* ## ", text, re.M) == targets

"""The README does what it says: its code runs, its numbers and links hold."""

import re
from pathlib import Path

import pytest

from kvq.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language):
    """The README's only code block in a language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    return text


def test_the_library_example_prints_what_it_says(capsys):
    code = block("python")
    assert len(code.strip().splitlines()) <= 12
    exec(code, {})
    assert capsys.readouterr().out == block("text")


def test_the_finding_is_in_the_data():
    """At equal bits and group size: NMSE of keys per token over NMSE per channel."""
    rows, _ = read_table(ROOT / "figures/data/group_size.csv")
    error = {
        (r["per"], r["bits"], r["group"]): r["nmse"]
        for r in rows
        if r["tensor"] == "K" and r["bits"] in (2, 4)
    }
    ratios = [
        nmse / error["channel", bits, group]
        for (per, bits, group), nmse in error.items()
        if per == "token"
    ]
    assert len(ratios) == 10
    low, high = re.search(r"\*\*(\d+) to (\d+) times\*\*", README).groups()
    assert (round(min(ratios)), round(max(ratios))) == (int(low), int(high))


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "kernels/README.md", "kvq/formats/README.md"],
)
def test_links_lead_to_files(document):
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+?)\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert [x for x in local if not (path.parent / x).exists()] == []


def test_the_number_of_formats_is_right():
    from kvq.formats import all_formats

    assert int(re.search(r"# (\d+) cache formats", README)[1]) == len(all_formats())


def test_what_the_readme_says_about_four_bits_is_in_the_data():
    rows, _ = read_table(ROOT / "figures/data/quality_smollm2.csv")
    change = {row["policy"]: row["change_percent"] for row in rows}
    low, high = re.search(r"anything from ([\d.]+) to (\d+) %", README).groups()
    four = [
        change[name]
        for name in change
        if "4" in name.split("-")[0] and "fp16" not in name
    ] + [change["kivi-4"]]
    assert f"{min(four):.1f}" == low
    assert round(max(four)) == int(high)


def test_every_lesson_is_in_the_table():
    notebooks = sorted(p.stem for p in (ROOT / "lessons").glob("[0-9][0-9]_*.ipynb"))
    assert notebooks
    for part in ("lessons", "lessons/solutions"):
        listed = re.findall(rf"\({part}/([0-9][0-9]_\w+)\.ipynb\)", README)
        assert listed == notebooks


def test_the_commands_of_the_readme_exist(capsys):
    from kvq.cli import main

    lines = re.findall(r"^kvq (.+?)(?:  #.*)?$", README, re.M)
    assert len(lines) == 15
    for line in lines:
        command, *arguments = line.split("#")[0].split()
        with pytest.raises(SystemExit) as exit_:
            main([command, *arguments, "--help"])
        assert exit_.value.code == 0
        writes_a_file = command in ("model", "capture") or "explain" in arguments
        assert ("--json" in capsys.readouterr().out) != writes_a_file

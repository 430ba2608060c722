"""The committed PTX: what is found, what is not, and that drift is seen."""

import gzip
import importlib
import json
import shutil

import pytest

from kvq.kernels import ptx
from kvq.kernels.launch import nvrtc
from kvq.kernels.ptx.specializations import specializations

writer = importlib.import_module("kvq.kernels.ptx.__main__")
HALF = {"X": "__half", "S": "__half"}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The package's kernels in a folder that may be changed."""
    folders = {path.parent.name for path in ptx.KERNELS.glob("*/*.cu")}
    for name in (*folders, "ptx"):
        shutil.copytree(ptx.KERNELS / name, tmp_path / name)
    for name in ("kvq.cuh", "device.py"):
        shutil.copy(ptx.KERNELS / name, tmp_path)
    monkeypatch.setattr(ptx, "KERNELS", tmp_path)
    monkeypatch.setattr(ptx, "FOLDER", tmp_path / "ptx")
    for module in ptx.COMPILERS.values():
        monkeypatch.setattr(module, "KERNELS", tmp_path)
    ptx.index.cache_clear()
    yield tmp_path
    ptx.index.cache_clear()


def test_both_languages_are_found():
    source = "pack/v1_word_per_thread"
    c = ptx.find(source, HALF)
    assert ".visible .entry pack_v1(" in c
    assert ".visible .entry pack_v1_scales(" in c
    assert ptx.find(source, dict(reversed(HALF.items())), "c", "pack_v1") == c
    numba = ptx.find(source, HALF, "numba", "pack_v1")
    assert ".visible .entry pack_v1(" in numba
    assert "pack_v1_scales" not in numba


@pytest.mark.parametrize(
    ("source", "constants", "language", "kernel"),
    [
        ("pack/v1_word_per_thread", HALF | {"S": "double"}, "c", None),
        ("pack/v1_word_per_thread", HALF | {"BITS": 4}, "c", None),
        ("pack/v1_word_per_thread", HALF, "numba", None),
        ("pack/v9", HALF, "c", None),
    ],
)
def test_what_is_not_here_is_none(source, constants, language, kernel):
    assert ptx.find(source, constants, language, kernel) is None


def test_an_unknown_language_is_refused():
    with pytest.raises(ValueError, match="language='opencl'; valid: c, numba"):
        ptx.find("pack/v1_word_per_thread", HALF, "opencl")


@pytest.mark.parametrize("name", ["pack/v1_word_per_thread.cu", "kvq.cuh"])
def test_a_changed_source_has_no_ptx(copy, name):
    source = "pack/v1_word_per_thread"
    assert ptx.find(source, HALF) is not None
    path = copy / name
    path.write_text(path.read_text() + "\n// edited\n")
    assert ptx.find(source, HALF) is None
    assert ptx.find(source, HALF, "numba", "pack_v1") is not None


def test_a_changed_twin_has_no_ptx(copy):
    source = "pack/v1_word_per_thread"
    assert ptx.find(source, HALF, "numba", "pack_v1") is not None
    path = copy / "device.py"
    path.write_text(path.read_text() + "\n# edited\n")
    assert ptx.find(source, HALF, "numba", "pack_v1") is None
    assert ptx.find(source, HALF) is not None


def test_every_specialization_is_here_and_no_folder_is_named():
    for source, kernel, constants in specializations():
        languages = [x for x in ptx.LANGUAGES if ptx.source_hash(source, x)]
        assert languages == ["c"] or languages == ["c", "numba"]
        for language in languages:
            text = ptx.find(source, constants, language, kernel)
            assert f".visible .entry {kernel}(" in text, (source, language, constants)
            files = [line for line in text.splitlines() if line.startswith("\t.file")]
            assert files
            assert not [line for line in files if '"/' in line or ":\\" in line]


def test_the_folder_is_small():
    sizes = [path.stat().st_size for path in ptx.FOLDER.rglob("*") if path.is_file()]
    assert sum(sizes) < 4e6


# --- drift ----------------------------------------------------------------------------
def entry_of(copy):
    """The first entry of the index in C."""
    return next(e for e in ptx.index().values() if e["language"] == "c")


def test_a_text_that_was_changed_is_seen(copy):
    entry = entry_of(copy)
    path = ptx.FOLDER / entry["file"]
    path.write_bytes(gzip.compress(ptx.read(path).encode() + b"// edited\n"))
    assert writer.difference(entry, False) == "is not what index.json says"
    path.unlink()
    assert writer.difference(entry, False) == "is not what index.json says"


def test_a_source_that_was_changed_is_seen(copy):
    entry = entry_of(copy)
    assert writer.difference(entry, False) is None
    (copy / "kvq.cuh").write_text((copy / "kvq.cuh").read_text() + "// edited\n")
    expected = f"is older than the source of {entry['source']}"
    assert writer.difference(entry, False) == expected


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
def test_a_text_that_the_compiler_does_not_give_is_seen(copy, monkeypatch):
    entry = entry_of(copy)
    monkeypatch.setattr(writer, "compiler", lambda language: entry["compiler"])
    text = ptx.read(ptx.FOLDER / entry["file"])
    monkeypatch.setattr(writer, "compiled", lambda entry: text + " ")
    assert writer.difference(entry, False) is None
    assert writer.difference(entry) == f"is not what {entry['compiler']} gives"
    monkeypatch.setattr(writer, "compiled", lambda entry: text)
    assert writer.difference(entry) is None


def test_a_missing_and_a_needless_text_are_seen(copy, monkeypatch):
    monkeypatch.setattr(writer, "difference", lambda entry, again: None)
    wanted = writer.wanted()
    monkeypatch.setattr(writer, "wanted", lambda: wanted)
    assert list(writer.differences()) == []
    first = next(iter(wanted))
    needed = wanted.pop(first)
    assert list(writer.differences()) == [f"{needed['file']} is no longer wanted"]
    wanted[first] = needed
    path = ptx.FOLDER / "index.json"
    entries = [e for e in json.loads(path.read_text()) if e["file"] != needed["file"]]
    path.write_text(json.dumps(entries))
    ptx.index.cache_clear()
    assert list(writer.differences()) == [f"{needed['file']} is missing"]

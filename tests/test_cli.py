"""The `kvq` command: what it prints, what it writes, and what it refuses."""

import csv
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from plain import uneven

from kvq import doctor
from kvq.cli import main
from kvq.commands import common, presets
from kvq.commands.study import VIEWS
from kvq.memory import ModelShape, cache_bytes
from kvq.scheme import PRESETS
from kvq.study import STUDIES
from kvq.tables import read_table

SHAPE = "--layers 4 --kv-heads 2 --head-dim 80"
needs_plots = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


@pytest.fixture
def kvq(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        code = main(line.split())
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def small(tmp_path):
    """A file with k (2, 40, 16), v (2, 40, 12) and q (4, 5, 16)."""
    path = tmp_path / "small.npz"
    k, v, q = uneven((2, 40, 16)), uneven((2, 40, 12), 1), uneven((4, 5, 16), 2)
    np.savez(path, k=k, v=v, q=q)
    return path


def columns(out, title):
    """{first cell: cell below `title`} of a printed table without empty cells."""
    titles, *rows = [line.split("  ") for line in out.splitlines() if "  " in line]
    titles, *rows = ([c.strip() for c in r if c.strip()] for r in (titles, *rows))
    return {r[0]: r[titles.index(title)] for r in rows if len(r) == len(titles)}


# --- plan -----------------------------------------------------------------------------
def test_plan_prints_what_memory_computes(kvq):
    code, out, err = kvq(
        f"plan {SHAPE} --tokens 5000 --batch 3 --memory 1GiB --params 100M "
        "--policies fp16,kivi-2"
    )
    assert (code, err) == (0, "")
    shape = ModelShape(layers=4, kv_heads=2, head_dim=80)
    nbytes = cache_bytes("kivi-2", shape, tokens=5000, batch=3)
    assert columns(out, "cache")["kivi-2"] == f"{nbytes / 2**20:.2f} MiB"
    assert columns(out, "total")["kivi-2"] == f"{(nbytes + 2e8) / 2**20:.2f} MiB"
    assert columns(out, "KiB/token")["fp16"] == f"{4 * 2 * 2 * 80 * 2 / 1024:.2f}"
    longest = (2**30 - 200_000_000) // (3 * 4 * 2 * 2 * 80 * 2)
    assert columns(out, "max tokens")["fp16"] == f"{longest:,}"
    assert columns(out, "max users")["fp16"] == str(longest * 3 // 5000)
    assert columns(out, "speed-up <=")["fp16"] == "1.00x"


def test_plan_of_the_worked_example(kvq):
    _, out, _ = kvq("plan --config llama-3.1-8b --policies fp16,int4-token-g64")
    assert columns(out, "cache") == {"fp16": "1.00 GiB", "int4-token-g64": "272.00 MiB"}
    assert columns(out, "speed-up <=")["int4-token-g64"] == "3.76x"
    assert "total" not in out  # no device: sizes alone


def test_plan_reads_a_configuration_file(kvq, tmp_path):
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = kvq("plan --config config.json --json --policies fp16 --tokens 7")
    assert code == 0
    answer = json.loads(out)
    assert answer["rows"][0]["cache_bytes"] == 3 * 4 * 24 * 2 * 2 * 7
    assert answer["shape"]["kv_heads"] == 4
    assert answer["tokens"] == 7


def test_plan_for_a_device_and_its_memory(kvq):
    line = "plan --config llama-2-7b --policies kivi-4 --json"
    _, out, _ = kvq(f"{line} --device rtx4090")
    answer = json.loads(out)
    assert answer["usable_bytes"] == 24564 * 2**20
    assert answer["rows"][0]["limit"] in ("bandwidth", "instructions")
    _, out, _ = kvq(f"{line} --device rtx4090 --memory 20GB --reserve 1GB")
    less = json.loads(out)
    assert less["usable_bytes"] == 20 * 10**9
    assert less["rows"][0]["max_tokens"] < answer["rows"][0]["max_tokens"]
    _, out, _ = kvq(f"{line} --memory 20GB")
    assert "step_seconds" not in json.loads(out)["rows"][0]


def test_plan_of_one_of_several_ranks(kvq):
    line = "plan --config llama-3.1-8b --policies fp16 --memory 80GiB --json"
    whole, half = (json.loads(kvq(f"{line} --tensor-parallel {n}")[1]) for n in (1, 2))
    assert half["rows"][0]["cache_bytes"] * 2 == whole["rows"][0]["cache_bytes"]
    assert half["weight_bytes"] * 2 == whole["weight_bytes"]


def test_plan_warns_of_coarse_keys_with_a_measured_number(kvq):
    _, out, _ = kvq(f"plan {SHAPE} --policies int2-token-g32,nf4-g64,int8-token,kivi-2")
    text = " ".join(out.split())
    assert "note: int2-token-g32, nf4-g64: some channels of real keys" in text
    assert "leaves 6.1 times the squared error of a scale per channel" in text
    _, out, _ = kvq(f"plan {SHAPE} --policies int8-token,kivi-2,fp16")
    assert "note:" not in out


def test_plan_says_when_a_context_is_longer_than_the_model_knows(kvq):
    _, out, _ = kvq("plan --config smollm2-135m --tokens 9000 --policies fp16")
    assert "note: the model was made for 8,192 tokens." in out


# --- study ----------------------------------------------------------------------------
@needs_plots
def test_study_writes_three_files_and_prints_the_table(kvq, tmp_path, small):
    code, out, err = kvq(
        f"study residual --data {small} --windows 0,8,99 --bits 4 --group 8 "
        "--sinks 2 --out a/b"
    )
    assert code == 0
    files = {"residual.csv", "residual.png", "residual.svg"}
    assert {p.name for p in (tmp_path / "a/b").iterdir()} == files
    rows, header = read_table(tmp_path / "a/b/residual.csv")
    assert [r["residual"] for r in rows] == [0, 8, 99]
    assert header["command"] == (
        "kvq study residual --data small.npz --bits 4 --group 8 --windows 0,8,99 "
        "--sinks 2"
    )
    assert header["data"] == "small.npz"
    table = out.splitlines()
    assert table[1].split() == ["bits", "sinks", *(f"residual={R}" for R in (0, 8, 99))]
    assert table[2].split()[2] == f"{rows[0]['output_error']:.3g}"
    assert "point" in err  # the progress bar
    assert "wrote a/b/residual.csv" in err


@needs_plots
def test_study_as_json_keeps_stdout_clean(kvq, small):
    code, out, err = kvq(f"study bits --data {small} --bits 2 --json --quiet")
    assert code == 0
    rows = json.loads(out)
    assert {r["bits"] for r in rows} == {2}
    assert {r["tensor"] for r in rows} == {"K", "V", "Gaussian"}
    assert err == "".join(f"wrote kvq-study/bits.{k}\n" for k in ("csv", "png", "svg"))


@needs_plots
def test_study_on_the_bundled_sample_knows_its_rope(kvq, tmp_path):
    code, out, _ = kvq("study axis --layer 7 --bits 4 --group 32 --quiet")
    assert code == 0
    assert "SmolLM2-135M layer 7" in out
    assert "K before RoPE" in out
    code, out, _ = kvq("study axis --data synthetic --bits 4 --quiet")
    assert code == 0
    assert "RoPE" not in out


@needs_plots
def test_a_failure_leaves_nothing_behind(kvq, tmp_path, small, monkeypatch):
    from kvq import plots

    def save(fig, stem):
        stem.with_suffix(".svg").write_text("half of it")
        raise OSError(28, "No space left on device", str(stem))

    monkeypatch.setattr(plots, "save", save)
    code, out, err = kvq(f"study bits --data {small} --bits 2 --quiet --out here")
    assert (code, out) == (2, "")
    assert "No space left on device" in err
    assert list((tmp_path / "here").iterdir()) == []


def test_study_without_a_name_lists_them(kvq):
    code, out, _ = kvq("study")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(STUDIES)
    assert "Which numbers should share a scale?" in out
    assert list(VIEWS) == list(STUDIES)


# --- presets, lessons, doctor ---------------------------------------------------------
def test_presets_lists_all_with_their_bits(kvq):
    code, out, _ = kvq("presets")
    assert code == 0
    bits = columns(out, "bits/number")
    assert list(bits) == list(PRESETS)
    assert bits["int4-token-g64"] == "4.250"
    assert bits["kivi-2"] == "3.203"  # 3 bits, and 128 of 8192 tokens in 16
    answer = json.loads(kvq("presets --json")[1])
    assert [p["name"] for p in answer] == list(PRESETS)
    assert answer[0]["key"]["levels"] == "float16"


def test_lessons_lists_those_of_the_checkout(kvq, tmp_path, monkeypatch):
    import kvq as package

    fake = tmp_path / "checkout"
    for part in ("kvq", "lessons/src", "lessons/html"):
        (fake / part).mkdir(parents=True)
    monkeypatch.setattr(package, "__file__", str(fake / "kvq/__init__.py"))
    code, _, err = kvq("lessons")
    assert code == 2
    assert err.startswith("kvq: error: no lessons here")
    text = "# %% [markdown]\n# # Outliers: a few channels\n# ## Not this\n"
    (fake / "lessons/src/12_outliers.py").write_text(text)
    (fake / "lessons/src/13_other.py").write_text(text.replace("Outliers", "Other"))
    (fake / "lessons/html/12_outliers.html").write_text("")
    code, out, _ = kvq("lessons")
    assert code == 0
    assert "12_outliers  yes         Outliers: a few channels" in out
    assert "13_other     no          Other: a few channels" in out
    assert "make lessons" in out
    found = json.loads(kvq("lessons --json")[1])
    assert found[0]["page"].endswith("lessons/html/12_outliers.html")
    assert found[1]["page"] is None


def test_doctor_names_versions_gpu_and_backends(kvq):
    code, out, _ = kvq("doctor")
    assert code == 0
    assert f"numpy          {np.__version__}" in out
    assert "GPU  " in out
    code, out, _ = kvq("doctor --json")
    report = json.loads(out)
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["backends"]["numpy"] is None
    assert report["gpu"]["what"]
    assert report["cores"] >= 1


def test_doctor_reports_what_cannot_run(kvq, monkeypatch):
    from kvq.kernels import BACKENDS

    monkeypatch.setattr(
        type(BACKENDS["numba-cpu"]), "unavailable", lambda self: "No module 'numba'"
    )
    monkeypatch.setattr("kvq.kernels.backends.gpu_status", lambda: (False, "no CUDA"))
    _, out, _ = kvq("doctor")
    assert "numba-cpu    cannot run: No module 'numba'" in out
    assert "GPU            none: no CUDA" in out


def test_doctor_without_the_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvq.kernels", None)
    monkeypatch.delattr("kvq.kernels", raising=False)
    report = doctor.examine()
    assert report["backends"] == {}
    assert report["gpu"]["what"] == "kvq.kernels is not installed"


# --- wrong input ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("nope", "invalid choice: 'nope'"),
        ("plan", "the model is unknown: give --config, or --layers"),
        ("plan --layers 3 --kv-heads 2", "the model is unknown"),
        ("plan --config nope", "no file nope; bundled configurations: deepseek-v3"),
        ("plan --config bad.json", "bad.json is not JSON"),
        ("plan --config list.json", "holds a list; expected an object"),
        ("plan --config part.json", "the config has no num_attention_heads"),
        ("plan --config .", ".: Is a directory"),
        ("plan --config llama-2-7b --q-heads 8", "--q-heads and --config exclude"),
        (f"plan {SHAPE} --device nope", "unknown device 'nope'; valid: A100-40GB"),
        (f"plan {SHAPE} --device L4", "how large are the weights?"),
        (f"plan {SHAPE} --weights 1GB --params 1B", "exclude each other"),
        (f"plan {SHAPE} --weights 5XB", "'5XB' is not a size; valid: 24GiB"),
        (f"plan {SHAPE} --memory -1", "'-1' is not a size"),
        (f"plan {SHAPE} --params 1GiB", "'1GiB' is not a number of parameters"),
        (f"plan {SHAPE} --params inf", "'inf' is not a number of parameters"),
        (f"plan {SHAPE} --tokens -1", "tokens=-1; valid: an integer >= 0"),
        (f"plan {SHAPE} --tokens 1e6", "argument --tokens: invalid int value: '1e6'"),
        (f"plan {SHAPE} --batch 0", "batch=0; valid: an integer >= 1"),
        (f"plan {SHAPE} --policies kivi-4,int5", "unknown policy 'int5'; valid: fp16"),
        (f"plan {SHAPE} --policies rotated-int4", "a power of two, not 80"),
        (f"plan {SHAPE} --tensor-parallel 3", "tensor_parallel=3 with kv_heads=2"),
        ("plan --config llama-2-7b --tensor-parallel 0", "tensor_parallel=0"),
        ("plan --layers -1 --kv-heads 2 --head-dim 8", "layers=-1"),
        ("study nope", "unknown study 'nope'; valid: group-size, bits"),
        ("study bits --nope", "unrecognized arguments: --nope"),
        ("study bits --bits x", "'x' is not a list of integers; valid: 2,4,8"),
        ("study bits --bits 9 --quiet", "bits=9 with levels='symmetric'"),
        ("study bits --group 0 --quiet", "group=0; valid: an integer >= 1"),
        ("study bits --per token,channel", "bits takes one value for --per"),
        ("study bits --jobs 0 --quiet", "jobs=0; valid: an integer >= 1, or -1"),
        ("study bits --layer 3", "layer=3; valid: 0, 7, 15, 29"),
        ("study bits --data synthetic --layer 0", "synthetic data has no layers"),
        ("study codebook --bits 3", "codebook has no --bits; valid: --per, --group"),
        ("study axis --rope-base -2", "'-2' is not a number above 0"),
        ("study residual --windows -3 --quiet", "residual=-3"),
        ("study bits --out bad.json", "cannot write to bad.json"),
        ("study bits --out bad.json/x", "cannot write to bad.json/x"),
        ("study bits --data nope.npz", "nope.npz: No such file or directory"),
        ("study bits --data bad.json", "valid: .npz, .safetensors"),
        ("study bits --data text.npz", "text.npz: "),
        ("study bits --data integers.npz", "k has dtype int32"),
        ("study bits --data nan.npz", "k holds nan"),
        ("study bits --data shapes.npz", "expected k (H_kv, T, D)"),
        ("study bits --data objects.npz", "objects.npz: "),
        ("study bits --data layers.npz", "k_N and v_N with layer=N"),
        ("study bits --data layers.npz --layer 9", "has no 'k_9'"),
        ("study residual --data no_queries.npz", "needs queries"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(line, message, kvq, tmp_path):
    if "study" in line and "--" in line:
        pytest.importorskip("matplotlib")
    write_wrong_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, out, err = kvq(line)
    assert code == 2
    assert out == ""
    assert err.startswith("kvq: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


def write_wrong_files(folder):
    k = uneven((2, 6, 4))
    (folder / "bad.json").write_text('{"num_hidden_layers": ')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "part.json").write_text('{"num_hidden_layers": 3}')
    (folder / "text.npz").write_text("not an archive")
    np.savez(folder / "integers.npz", k=k.astype(np.int32), v=k)
    np.savez(folder / "nan.npz", k=k * np.nan, v=k)
    np.savez(folder / "shapes.npz", k=k, v=k[:, :2])
    np.savez(folder / "objects.npz", k=np.array([{}]), v=k)
    np.savez(folder / "layers.npz", k_1=k, v_1=k, k_2=k, v_2=k)
    np.savez(folder / "no_queries.npz", k=k, v=k)


def test_a_missing_package_is_named_with_the_extra_that_has_it(kvq, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = kvq("study bits")
    assert code == 2
    assert err.startswith("kvq: error: ")
    assert err.endswith(": pip install 'kvq-reference[study]'\n")


@pytest.mark.parametrize("text", ["16000000000", "16GB", "16 GB", "16,000MB", "16e9"])
def test_sizes(text):
    assert common.size(text) == 16 * 10**9


def test_binary_sizes_and_counts():
    assert common.size("1.5GiB") == 3 * 2**29
    assert common.size("3kib") == 3072
    assert common.count("8.03B") == 8_030_000_000
    assert common.count("135m") == 135_000_000


# --- the process ----------------------------------------------------------------------
def test_interrupt_gives_130(kvq, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(presets, "presets", interrupt)
    assert kvq("presets") == (130, "", "")


def test_a_reader_that_stops_reading_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvq", "presets"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_and_version_need_no_heavy_package():
    code = (
        "import sys; from kvq.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'matplotlib', 'numba', 'joblib', 'ml_dtypes', 'kvq.study'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("plan", "study", "presets", "lessons", "doctor"):
        assert f"\n    {command}" in done.stdout


def test_every_command_has_help(capsys):
    for command in ("plan", "study", "presets", "lessons", "doctor"):
        with pytest.raises(SystemExit) as exit_:
            main([command, "--help"])
        assert exit_.value.code == 0
        assert f"usage: kvq {command}" in capsys.readouterr().out


def test_csv_and_json_agree(kvq, small, tmp_path):
    pytest.importorskip("matplotlib")
    _, out, _ = kvq(f"study codebook --data {small} --per token --json --quiet")
    lines = (tmp_path / "kvq-study/codebook.csv").read_text().splitlines()
    rows = list(csv.DictReader(x for x in lines if not x.startswith("#")))
    assert [float(r["nmse"]) for r in rows] == [r["nmse"] for r in json.loads(out)]


def test_plan_shows_pages_where_there_are_some(kvq):
    plain = kvq("plan --config llama-3.1-8b --policies fp16,kivi-4")[1]
    assert "KiB/page" not in plain
    paged = kvq("plan --config llama-3.1-8b --policies fp16,kivi-4 --page 64")[1]
    assert "KiB/page" in paged
    rows = json.loads(
        kvq("plan --config llama-3.1-8b --policies fp16,ggml:q8_0 --page 64 --json")[1]
    )["rows"]
    assert [row["page_bytes"] for row in rows] == [64 * 131072, 64 * 131072 * 8.5 / 16]


def test_plan_counts_a_shared_prefix_once(kvq):
    command = "plan --config llama-3.1-8b --policies int4-token-g64,ggml:q8_0 --json"
    alone, shared = (
        json.loads(kvq(f"{command} --batch 4 --page 256 {more}")[1])["rows"]
        for more in ("", "--prefix 4096")
    )
    for before, after in zip(alone, shared, strict=True):
        saved = before["cache_bytes"] - after["cache_bytes"]
        assert saved == 3 * 4096 * before["bytes_per_token"]


@pytest.mark.parametrize("policy", ["kivi-4", "ggml:q8_0", "vllm:nvfp4"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--page 0", "page=0; valid: an integer >= 1"),
        ("--page -2", "page=-2; valid: an integer >= 1"),
        ("--prefix -1", "prefix=-1; valid: an integer >= 0"),
        ("--tokens -1", "tokens=-1; valid: an integer >= 0"),
        ("--batch 0", "batch=0; valid: an integer >= 1"),
    ],
)
def test_plan_refuses_impossible_numbers_for_every_kind_of_policy(
    kvq, policy, option, message
):
    code, out, err = kvq(f"plan --config llama-3.1-8b --policies {policy} {option}")
    assert (code, out) == (2, "")
    assert err == f"kvq: error: {message}\n"

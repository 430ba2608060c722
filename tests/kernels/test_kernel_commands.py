"""`kvq kernels`: what it prints, what it refuses; the source with its counters."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvq.cli import main
from kvq.commands.kernels import parse
from kvq.kernels import explain, ptxsim, report, static
from kvq.kernels.launch import nvrtc

no_compiler = nvrtc.unavailable()
needs_nvrtc = pytest.mark.skipif(no_compiler is not None, reason=str(no_compiler))
no_tools = no_compiler or static.unavailable()
needs_tools = pytest.mark.skipif(no_tools is not None, reason=str(no_tools))

SCALE = """
extern "C" __global__ void scale(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = FACTOR * x[STRIDE * i];
}
"""
# The same by hand, one thread for each number and no test of i.
PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 p0, .param .u64 p1)
{
    .reg .b32 %r<2>;
    .reg .f32 %f<3>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [p0];
    ld.param.u64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, %f1;
    add.s64 %rd5, %rd2, %rd3;
    st.global.f32 [%rd5], %f2;
    ret;
}
"""


@pytest.fixture
def kvq(capsys, tmp_path, monkeypatch):
    """Runs a command line in a folder with scale.cu and scale.ptx."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale.cu").write_text(SCALE)
    (tmp_path / "scale.ptx").write_text(PTX)

    def run(line):
        code = main(["kernels", *line.split()])
        out, err = capsys.readouterr()
        return code, out, err

    return run


# --- check ----------------------------------------------------------------------------
ARGS = "x:f32[1000]=random out:f32[1000]=0 n:i32=1000 --grid 8 --block 128"


@needs_nvrtc
def test_check_runs_a_kernel_and_counts(kvq):
    line = f"check scale.cu scale {ARGS} -D FACTOR=2 -D STRIDE=1"
    code, out, err = kvq(line)
    assert (code, err) == (0, "")
    assert "scale: 8 x 128 threads, no fault" in out
    x = parse("x:f32[1000]=random", 0)[1]
    begins = ", ".join(f"{v:.6g}" for v in 2 * x[:4])
    assert f"out: 1000 of 1000 changed; it begins {begins}" in out
    counts = json.loads(kvq(f"{line} --json")[1])
    assert counts["changed"] == {"x": 0, "out": 1000}
    assert counts["sectors"] == counts["ideal_sectors"] == 250


@needs_nvrtc
def test_check_names_the_line_that_wastes(kvq):
    line = "check scale.cu scale x:f32[8000]=1 out:f32[1000]=0 n:i32=1000 --grid 8"
    _, out, _ = kvq(f"{line} --block 128 -D FACTOR=2 -D STRIDE=8")
    assert "line 4: 4.50 x the ideal sectors" in out  # 1000 + 125, in place of 250


@needs_nvrtc
def test_check_names_buffer_thread_and_line(kvq):
    args = ARGS.replace("n:i32=1000", "n:i32=1001")
    code, out, err = kvq(f"check scale.cu scale {args} -D FACTOR=2 -D STRIDE=1")
    assert (code, out) == (2, "")
    assert re.search(
        r"out of bounds.*argument 0 \(x\).*block 7 thread 104.* line 4", err
    )
    assert err.count("\n") == 1


def test_check_of_ptx_needs_no_compiler(kvq, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "needs nvidia-cuda-nvrtc")
    code, out, _ = kvq(
        "check scale.ptx scale x:f32[40]=arange out:f32[40]=0 --block 40"
    )
    assert code == 0
    assert "out: 39 of 40 changed; it begins 0, 2, 4, 6" in out  # 2 * 0 is no change
    code, _, err = kvq("check scale.ptx scale x:f32[40]=1 out:f32[39]=0 --block 40")
    assert code == 2
    assert "argument 1 (out)" in err
    assert "thread 39" in err
    code, _, err = kvq("check scale.cu scale x:f32[40]=1")
    assert code == 2
    assert "cannot be compiled: needs nvidia-cuda-nvrtc; valid: FILE.ptx" in err


@needs_nvrtc
def test_check_prints_what_the_compiler_says(kvq):
    code, _, err = kvq(f"check scale.cu scale {ARGS} -D STRIDE=1")
    assert code == 2
    assert 'scale.cu(4): error: identifier "FACTOR" is undefined' in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("scale.ptx scale x:f32[40]=1", "1 arguments, 2 are wanted"),
        ("scale.ptx scale x:f32[40]=1 y:i32=1", "argument 1 (y): 4 bytes given, 8"),
        ("scale.ptx other x:f32[40]=1", "kernel 'other': not one of scale"),
        ("scale.ptx scale a:i64=0 b:i64=0 --block 2000", "block 2000: 1 to 3 numbers"),
        ("scale.txt scale", "file 'scale.txt'; valid: FILE.cu, FILE.ptx"),
        ("no.ptx scale", "no.ptx: No such file"),
        (
            "scale.ptx scale x:f31[40]=1",
            "argument 'x:f31[40]=1'; valid: NAME:TYPE[SIZE]",
        ),
        ("scale.ptx scale x:f32[40]", "argument 'x:f32[40]'; valid: NAME:TYPE[SIZE]"),
        ("scale.ptx scale x:f32[40]=one", "'one' is not float32; valid: NAME:TYPE"),
        ("scale.ptx scale x:i8[40]=200", "'200' is not int8; valid: NAME:TYPE"),
        ("scale.ptx scale x:f32[40]=no.npy", "no.npy: No such file"),
    ],
)
def test_check_refuses_in_one_line(kvq, line, message):
    code, out, err = kvq(f"check {line}")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_arguments_are_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, x = parse("x:f16[7]=random", 3)
    assert (name, x.dtype, x.shape) == ("x", np.float16, (7,))
    np.testing.assert_array_equal(parse("x:f16[7]=random", 3)[1], x)
    assert not np.array_equal(parse("x:f16[7]=random", 4)[1], x)
    np.testing.assert_array_equal(parse("x:u8[3]=arange")[1], np.uint8([0, 1, 2]))
    np.testing.assert_array_equal(parse("x:i32[2]=-5")[1], np.int32([-5, -5]))
    assert parse("x:u32=0x6400")[1] == 25600
    assert type(parse("x:f64=1e-3")[1]) is np.float64
    np.save("k.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(parse("x:f32=k.npy")[1], np.float32(range(6)))
    for wrong in ("x:f16=k.npy", "x:f32[5]=k.npy"):
        with pytest.raises(ValueError, match=r"k\.npy has 6 of float32"):
            parse(wrong)
    assert parse("x:i32[90]=random")[1].min() < 0


# --- explain --------------------------------------------------------------------------
def test_explain_prints_the_source_and_a_page(kvq, tmp_path):
    code, out, err = kvq("explain dequant/v1 --html page.html")
    assert (code, err) == (0, "wrote page.html\n")
    assert "dequant v1, 4 bits" in out
    source = nvrtc.source_path("dequant/v1_value_per_thread")
    lines = source.read_text(encoding="utf-8").splitlines()
    shown = re.findall(r"^ *([\d.]+) %.* (\d+)  (\S.*|\s+\S.*)$", out, re.M)
    mine = [(int(n), text) for _, n, text in shown if text in lines]
    assert len(mine) > 5
    assert all(lines[n - 1] == text for n, text in mine)
    shares = [float(s) for s in re.findall(r"^ *([\d.]+) %", out, re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>The worst lines</h2>" in page
    assert "http" not in page
    assert "<script" not in page


def test_explain_knows_short_and_whole_names(kvq):
    code, _, err = kvq("explain decode/v9")
    assert code == 2
    assert re.search("no kernel 'decode/v9'; valid: pack/v1, .*decode/v1", err)
    assert kvq("explain dequant/v1_value_per_thread")[0] == 0


def test_the_line_that_wastes_most_comes_first():
    counts = ptxsim.LineCounts
    lines = [
        explain.Line("a.cu", 1, "busy", counts(instructions=90), 0.9),
        explain.Line("a.cu", 2, "never"),
        explain.Line("a.cu", 3, "ideal", counts(sectors=40, ideal_sectors=40), 0.05),
        explain.Line("a.cu", 4, "banks", counts(wavefronts=9, ideal_wavefronts=3), 0),
        explain.Line("a.cu", 5, " far", counts(sectors=80, ideal_sectors=20), 0.05),
    ]
    assert explain.summary(lines, most=3) == [
        "a.cu:5  5.0 % of the instructions, 4.00 x the ideal sectors:  far",
        "a.cu:4  0.0 % of the instructions, 3.00 x the ideal wavefronts:  banks",
        "a.cu:1  90.0 % of the instructions:  busy",
    ]
    text = list(explain.text(lines))
    assert [row[-1] for row in text][1:] == [
        *("a.cu", "busy", "...", "ideal", "banks", " far", explain.ELSEWHERE)
    ]
    page = explain.page("a < b", lines)
    assert "<title>a &lt; b</title>" in page
    assert "<td>2</td><td>never</td>" in page


def test_counters_of_two_launches_are_added(tmp_path, monkeypatch):
    (tmp_path / "a.cu").write_text("first\nsecond\n")
    monkeypatch.setattr(explain, "KERNELS", tmp_path)
    counts = ptxsim.LineCounts(instructions=3, sectors=2)
    places = {("a.cu", 2): counts, ("cuda_fp16.h", 7): counts}
    run = SimpleNamespace(report=SimpleNamespace(places=places))
    first, second = explain.source_lines([run, run])
    assert first.counts is None
    assert (second.counts.instructions, second.counts.sectors) == (6, 4)
    assert second.share == 0.5


# --- report ---------------------------------------------------------------------------
@needs_tools
def test_report_is_a_table_and_json(kvq, monkeypatch):
    monkeypatch.setattr(
        report, "versions", lambda: [("dequant", "v1"), ("dequant", "v2")]
    )
    code, out, _ = kvq("report --arch 80,90")
    assert code == 0
    rows = json.loads(kvq("report --arch 80,90 --json")[1])
    assert [(r["kernel"], r["arch"]) for r in rows] == [
        *(
            ("dequant_v1", 80),
            ("dequant_v1", 90),
            ("dequant_v2", 80),
            ("dequant_v2", 90),
        ),
    ]
    for row in rows:
        (line,) = re.findall(rf"^{row['kernel']} +{row['arch']} .*$", out, re.M)
        cells = line.split()
        assert cells[2:4] == [str(row["registers"]), str(row["spills"])]
        assert cells[8] == f"{row['instructions_per_byte']:.1f}"
        assert cells[9] == f"{row['sectors'] / row['ideal_sectors']:.2f}"
    lines = re.findall(r"^decode_v5 +(16|8|4|2) +(80|90) .*$", out, re.M)
    assert lines == [("16", "80"), ("16", "90"), ("4", "80"), ("4", "90")]
    assert re.search(r"^decode_v5 +4 +90 .* \d+% memory +\d+% memory *$", out, re.M)


@needs_tools
def test_instructions_for_a_byte_of_a_copy(tmp_path, monkeypatch):
    """One load and one store of 16 bytes a lane, and what surrounds them."""
    path = tmp_path / "copy.cu"
    path.write_text(
        """extern "C" __global__ void copy(const uint4* x, uint4* y) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        y[i] = x[i];
        }"""
    )
    x, y = np.zeros(4096, np.uint32), np.zeros(4096, np.uint32)
    kernel = ptxsim.Module(nvrtc.compile_ptx(path)).kernel("copy")
    counted = kernel.launch(8, 128, [x, y])
    run = report.Run(SimpleNamespace(args=(x, y)), kernel, counted)
    facts = static.facts(nvrtc.compile_cubin(path, {}, 80))["copy"]
    body = facts.code.index("EXIT") + 1  # straight code: each instruction runs once
    assert run.nbytes == 8 * 4096
    assert report.machine_instructions(run, facts) == body * 8 * 4


def test_report_without_a_compiler_says_so(kvq, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "needs nvidia-cuda-nvrtc")
    code, _, err = kvq("report")
    assert (code, err) == (2, "kvq: error: needs nvidia-cuda-nvrtc\n")

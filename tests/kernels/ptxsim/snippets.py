"""Run a few lines of PTX over NumPy arrays, one element per thread.

    run_snippet("add.s32 %d, %a, %b;", np.int32, a=x, b=y)  ->  x + y

Every keyword array `a` is loaded into a register `%a`, the result is what the lines
leave in `%d`. Registers have the width of the array's dtype: `.pred` for bool, `.b16`
for 8 and 16 bits (a float16 array gives its bits), `.b32`, `.b64`, `.f32`, `.f64`.
`%i` (.b32) is the index of the thread.
"""

import numpy as np

from kvq.kernels import ptxsim

HEADER = ".version 9.5\n.target sm_80\n.address_size 64\n"


def run_snippet(body, out, **options):
    """The results of `body` per thread; see `launch_snippet` for the options.

    `out` is the dtype of `%d`, or a dict of names and dtypes; a dict gives a dict.
    """
    return launch_snippet(body, out, **options)[0]


def launch_snippet(
    body,
    out,
    *,
    threads=None,
    block=None,
    buffers=None,
    shared=0,
    declare="",
    check=True,
    **inputs,
):
    """(results, report) of the PTX lines `body`.

    threads   how many run; by default as many as the inputs have elements
    block     threads per block; by default 128 or 32. Give a divisor of `threads` when
              the lines need every thread of a block or of a warp
    buffers   {name: array}: register `%name` (.b64) holds the array's address in
              global memory; the array is changed in place
    shared    bytes of shared memory; `%shared` (.b32) is its address, and the symbol
              is `smem`
    declare   further PTX at the head of the kernel, such as ".reg .b32 %t<3>;"
    """
    outputs = out if isinstance(out, dict) else {"d": out}
    buffers = buffers or {}
    if threads is None:
        threads = next(iter(inputs.values())).size
    if block is None:
        block = 128 if threads % 128 == 0 else min(32, threads)
    arrays = [np.ascontiguousarray(a).copy() for a in inputs.values()]
    results = {name: np.zeros(threads, dtype) for name, dtype in outputs.items()}
    for name, array in zip(inputs, arrays, strict=True):
        assert array.shape == (threads,), f"{name} needs one element per thread"
    ptx = snippet_ptx(
        body,
        {name: a.dtype for name, a in zip(inputs, arrays, strict=True)},
        {name: a.dtype for name, a in results.items()},
        list(buffers),
        shared,
        declare,
    )
    kernel = ptxsim.Module(ptx).kernel("snippet")
    args = [np.int32(threads), *arrays, *buffers.values(), *results.values()]
    report = kernel.launch(-(-threads // block), block, args, check=check)
    return (results if isinstance(out, dict) else results["d"]), report


def snippet_ptx(body, inputs, outputs, buffers=(), shared=0, declare=""):
    """The PTX text of the kernel `snippet`; inputs and outputs are {name: dtype}."""
    pointers = [*inputs, *buffers, *outputs]
    params = ", ".join([".param .u32 n", *(f".param .u64 p_{x}" for x in pointers)])
    lines = [
        declare,
        ".reg .b32 %i, %n_, %t_;",
        ".reg .b64 %at_, %o_;",
        ".reg .pred %q_;",
    ]
    lines += [f".reg .b64 %{name};" for name in buffers]
    lines += [f".reg {_register(t)} %{x};" for x, t in {**inputs, **outputs}.items()]
    if shared:
        lines.append(f".shared .align 16 .b8 smem[{shared}];")
        lines.append(".reg .b32 %shared; mov.u32 %shared, smem;")
    lines.append(
        "mov.u32 %i, %ctaid.x; mov.u32 %n_, %ntid.x; mov.u32 %t_, %tid.x;"
        "mad.lo.s32 %i, %i, %n_, %t_; ld.param.u32 %n_, [n];"
        "setp.ge.u32 %q_, %i, %n_; @%q_ exit;"
    )
    lines += [f"ld.param.u64 %{name}, [p_{name}];" for name in buffers]
    lines += [_load(name, np.dtype(dtype)) for name, dtype in inputs.items()]
    lines.append(body)
    lines += [_store(name, np.dtype(dtype)) for name, dtype in outputs.items()]
    text = "\n".join(lines)
    return f"{HEADER}.visible .entry snippet({params})\n{{\n{text}\nret;\n}}\n"


def _register(dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return ".pred"
    if dtype in (np.float32, np.float64):
        return f".f{8 * dtype.itemsize}"
    return f".b{max(16, 8 * dtype.itemsize)}"


def _access(dtype):
    if dtype in (np.float32, np.float64):
        return f"f{8 * dtype.itemsize}"
    return f"{'s' if dtype.kind == 'i' else 'u'}{8 * dtype.itemsize}"


def _address(name, dtype):
    return (
        f"ld.param.u64 %at_, [p_{name}];"
        f"mul.wide.u32 %o_, %i, {dtype.itemsize}; add.s64 %at_, %at_, %o_;"
    )


def _load(name, dtype):
    if dtype.kind == "b":
        load = f"ld.global.u8 %t_, [%at_]; setp.ne.u32 %{name}, %t_, 0;"
    else:
        load = f"ld.global.{_access(dtype)} %{name}, [%at_];"
    return _address(name, dtype) + load


def _store(name, dtype):
    if dtype.kind == "b":
        store = f"selp.u32 %t_, 1, 0, %{name}; st.global.u8 [%at_], %t_;"
    else:
        store = f"st.global.{_access(dtype)} [%at_], %{name};"
    return _address(name, dtype) + store

import io
import json
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from plain import uneven

from kvq import samples
from kvq.samples import LAYERS, before_rope, load_kv, real_kv, synthetic_kv
from kvq.transforms import rope

k, v, q = uneven((2, 5, 4)), uneven((2, 5, 3), 1), uneven((6, 3, 4), 2)


def npy(x):
    """The bytes of x in a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, x)
    return buffer.getvalue()


def header(shape, descr="<f4", version=b"\x01\x00"):
    """A .npy header that promises this shape, with no data behind it."""
    text = (
        f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    )
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text


def npz(path, **members):
    """A .npz file with these bytes as its members."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


# --- the bundled sample ---------------------------------------------------------------
@pytest.mark.parametrize("layer", LAYERS)
def test_real_keys_and_values_have_the_documented_shapes(layer):
    sample = real_kv(layer)
    assert sample.k.shape == sample.v.shape == (3, 512, 64)
    assert sample.q.shape == (9, 64, 64)
    assert sample.k.dtype == sample.v.dtype == sample.q.dtype == np.float16
    for x in (sample.k, sample.v, sample.q):
        assert np.isfinite(x).all()
        assert x.astype(np.float64).std() > 0.01
    assert str(layer) in sample.name


def test_layers_differ():
    a, b = real_kv(0), real_kv(29)
    assert not np.array_equal(a.k, b.k)
    assert not np.array_equal(a.k, a.v)


@pytest.mark.parametrize("layer", [1, -1, 30, None, "7", 7.0, False])
def test_another_layer_is_refused(layer):
    with pytest.raises(ValueError, match=r"layer=.*; valid: 0, 7, 15, 29"):
        real_kv(layer)


def test_keys_before_rope_turn_into_those_after():
    sample = real_kv()
    before = before_rope(sample.k)
    assert before.dtype == np.float32
    after = rope(before, np.arange(512), samples.ROPE_BASE)
    np.testing.assert_allclose(after, sample.k, atol=1e-4)
    np.testing.assert_array_equal(before[:, 0], sample.k[:, 0])


# --- synthetic ------------------------------------------------------------------------
def test_synthetic_outliers_stay_in_their_channels_at_every_token():
    sample = synthetic_kv(2, 400, 16, 4, 9, outlier_channels=3, outlier_scale=20)
    assert sample.k.shape == sample.v.shape == (2, 400, 16)
    assert sample.q.shape == (4, 9, 16)
    assert sample.k.dtype == sample.q.dtype == np.float32
    spread = sample.k.std(axis=1)
    assert ((spread > 10).sum(axis=-1) == 3).all()
    assert (sample.v.std(axis=1) < 2).all()


def test_synthetic_offsets_shift_the_outlier_channels_alone():
    sample = synthetic_kv(outlier_channels=1, outlier_scale=1, outlier_offset=50)
    shifted = sample.k.mean(axis=1) > 40
    assert (shifted.sum(axis=-1) == 1).all()


def test_synthetic_numbers_follow_the_seed():
    a, b, c = synthetic_kv(seed=1), synthetic_kv(seed=1), synthetic_kv(seed=2)
    np.testing.assert_array_equal(a.k, b.k)
    assert not np.array_equal(a.k, c.k)
    assert not np.array_equal(a.k, a.v)


@pytest.mark.parametrize("n", [-1, 65])
def test_there_are_no_more_outlier_channels_than_channels(n):
    with pytest.raises(ValueError, match=rf"outlier_channels={n}; valid: 0\.\.64"):
        synthetic_kv(outlier_channels=n)


# --- a user's file --------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_npz_files_are_read(tmp_path, dtype):
    path = tmp_path / "own.npz"
    np.savez(path, k=k.astype(dtype), v=v.astype(dtype), q=q)
    sample = load_kv(path)
    np.testing.assert_array_equal(sample.k, k.astype(dtype))
    np.testing.assert_array_equal(sample.v, v.astype(dtype))
    np.testing.assert_array_equal(sample.q, q)
    assert sample.name == "own.npz"


def test_files_without_queries_and_in_fortran_order_are_read(tmp_path):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, k=np.asfortranarray(k), v=v)
    sample = load_kv(str(path))
    np.testing.assert_array_equal(sample.k, k)
    assert sample.q is None


def test_layers_are_chosen_by_number_or_if_there_is_one(tmp_path):
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    np.savez(one, k_3=k, v_3=v, q_3=q)
    np.savez(two, k_3=k, v_3=v, k_11=-k, v_11=-v)
    assert load_kv(one).name == "one.npz 3"
    np.testing.assert_array_equal(load_kv(one).q, q)
    np.testing.assert_array_equal(load_kv(two, layer=11).k, -k)
    with pytest.raises(ValueError, match=r"holds k_11, k_3, v_11, v_3; .* layer=N"):
        load_kv(two)
    with pytest.raises(ValueError, match="has no 'k_4'; it holds k_3, q_3, v_3"):
        load_kv(one, layer=4)


def safetensors(path, **tensors):
    """A .safetensors file by its specification: {name: (dtype, shape, bytes)}."""
    head, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        span = [len(body), len(body) + len(data)]
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        body += data
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", ml_dtypes.bfloat16)],
)
def test_safetensors_files_are_read(tmp_path, name, dtype):
    path = safetensors(
        tmp_path / "own.safetensors",
        k=(name, k.shape, k.astype(dtype).tobytes()),
        v=(name, v.shape, v.astype(dtype).tobytes()),
    )
    sample = load_kv(path)
    assert sample.k.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(sample.k, k.astype(dtype))
    np.testing.assert_array_equal(sample.v, v.astype(dtype))


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"k": k}, ValueError, "has no 'v'; it holds k"),
        ({"a": k}, ValueError, "holds a; expected k and v"),
        ({"k": k, "v": v.astype(int)}, TypeError, "v has dtype int64"),
        ({"k": k.astype(np.uint16), "v": v}, TypeError, "raw 16-bit floats"),
        ({"k": k, "v": v * np.nan}, ValueError, "v holds nan"),
        ({"k": k, "v": v[:, :4]}, ValueError, "shapes"),
        ({"k": k, "v": v[:1]}, ValueError, "shapes"),
        ({"k": k[0], "v": v[0]}, ValueError, "shapes"),
        ({"k": k[:, :0], "v": v[:, :0]}, ValueError, "shapes"),
        ({"k": k, "v": v, "q": q[:5]}, ValueError, "H_q a multiple of H_kv"),
        ({"k": k, "v": v, "q": q[:0]}, ValueError, "shapes"),
        ({"k": k, "v": v, "q": q[..., :3]}, ValueError, "shapes"),
        ({"k": np.array([None, {}]), "v": v}, ValueError, "dtype object"),
    ],
)
def test_wrong_contents_are_named_with_the_file(tmp_path, arrays, error, message):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    with pytest.raises(error, match=rf"own\.npz: .*{message}") as caught:
        load_kv(path)
    assert "\n" not in str(caught.value)


def broken_deflate(data):
    """The compressed bytes of the first member, damaged in the middle."""
    middle = len(data) // 4
    return data[:middle] + bytes(64) + data[middle + 64 :]


BROKEN = {
    "text": b"hello",
    "nothing": b"",
    "a member that is no array": lambda p: npz(p, k=b"hi", v=npy(v)),
    "an empty member": lambda p: npz(p, k=b"", v=npy(v)),
    "a header cut short": lambda p: npz(p, k=npy(k)[:20], v=npy(v)),
    "data cut short": lambda p: npz(p, k=npy(k)[:-8], v=npy(v)),
    "more data promised": lambda p: npz(p, k=header((10**12, 4, 4)), v=npy(v)),
    "a negative shape": lambda p: npz(p, k=header((-2, -5, 4)) + bytes(160), v=npy(v)),
    "an unknown dtype": lambda p: npz(p, k=header((2, 5, 4), "zz"), v=npy(v)),
    "an unknown version": lambda p: npz(p, k=header((2, 5, 4), version=b"\x09\x00")),
    "a header of 60 kB": lambda p: npz(p, k=header(" " * 60000 + "(2,)"), v=npy(v)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_npz_file_is_one_line_that_names_it(tmp_path, what):
    path = tmp_path / "own.npz"
    content = BROKEN[what]
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    with pytest.raises(ValueError, match=r"own\.npz: cannot be read \(") as caught:
        load_kv(path)
    assert "\n" not in str(caught.value)


def patched(data, offsets, change):
    """`data` with the 16-bit field of each zip header changed: {signature: offset}."""
    data = bytearray(data)
    for signature, offset in offsets.items():
        start = data.find(signature)
        while start >= 0:
            at = start + offset
            data[at : at + 2] = change(data[at : at + 2])
            start = data.find(signature, at)
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.replace(k.tobytes()[40:80], k.tobytes()[44:84]), "CRC"),
        (
            lambda d: patched(
                d, {b"PK\x03\x04": 8, b"PK\x01\x02": 10}, lambda _: b"\x61\x00"
            ),
            "compression method",
        ),
        (
            lambda d: patched(
                d, {b"PK\x03\x04": 6, b"PK\x01\x02": 8}, lambda _: b"\x01\x00"
            ),
            "encrypted",
        ),
    ],
)
def test_a_damaged_archive_is_one_line_that_names_it(tmp_path, change, reason):
    path = tmp_path / "own.npz"
    np.savez(path, k=k, v=v)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"own\.npz: cannot be read \(.*{reason}"):
        load_kv(path)


def test_damaged_compressed_data_is_one_line_that_names_it(tmp_path):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, k=uneven((2, 900, 4)), v=uneven((2, 900, 4)))
    path.write_bytes(broken_deflate(path.read_bytes()))
    with pytest.raises(ValueError, match=r"own\.npz: cannot be read \("):
        load_kv(path)


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    for arrays in ({"k": np.array([Trap()]), "v": v}, {"k": k, "v": v, "x": [Trap()]}):
        path = tmp_path / "own.npz"
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match="dtype object does not fit"):
            load_kv(path)


def test_sizes_are_checked_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "SIZE_LIMIT", 5000)
    npz(tmp_path / "bomb.npz", k=npy(np.zeros((1, 10**5, 8), np.float32)), v=npy(v))
    assert (tmp_path / "bomb.npz").stat().st_size < 5000
    data = bytes(4 * 1500)
    path = safetensors(tmp_path / "big.safetensors", k=("F32", [1, 375, 4], data))
    for big in (tmp_path / "bomb.npz", path):
        with pytest.raises(ValueError, match="bytes; at most 5,000 are read"):
            load_kv(big)


@pytest.mark.parametrize(
    "content",
    [b"", b"xxxx", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"{}" + b"tail"],
)
def test_a_broken_safetensors_file_is_one_line_that_names_it(tmp_path, content):
    path = tmp_path / "own.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"own\.safetensors: ") as caught:
        load_kv(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "error"), [("F8_E4M3", ValueError), ("I8", TypeError), ("U8", TypeError)]
)
def test_other_safetensors_dtypes_are_refused(tmp_path, name, error):
    path = safetensors(
        tmp_path / "own.safetensors",
        k=(name, k.shape, bytes(k.size)),
        v=(name, v.shape, bytes(v.size)),
    )
    with pytest.raises(error, match=r"own\.safetensors: "):
        load_kv(path)


@pytest.mark.parametrize("name", ["missing.npz", "missing.safetensors"])
def test_a_missing_file_is_file_not_found(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="missing"):
        load_kv(tmp_path / name)


@pytest.mark.parametrize("name", ["own.pt", "own", "own.npz.gz", "own.npy"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"valid: \.npz, \.safetensors"):
        load_kv(tmp_path / name)

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_numpy
from safetensors.numpy import save as save_numpy

from p2pcast.checkpoint.safetensors_file import SafetensorsFile, header_for, parse_header
from p2pcast.codec.layout import DTYPES, Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError


def _file(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def _t(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


ATTACKS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "seven bytes": (bytes(7), "too few"),
    "header over the cap": (
        (limits.MAX_SAFETENSORS_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        "over the format's limit",
    ),
    "header of 2^64": (b"\xff" * 8 + b"{}", "over the format's limit"),
    "header longer than the file": ((100).to_bytes(8, "little") + b"{}", "cut short"),
    "no header": (bytes(8), "does not begin"),
    "space first": (_file(b" {}"), "does not begin"),
    "list": (_file(b"[]"), "does not begin"),
    "half": (_file(b'{"a"'), "not JSON"),
    "not UTF-8": (_file(b'{"\xff": 1}'), "not JSON"),
    "deep": (_file(b'{"a":' + b"[" * 100_000), "not JSON"),
    "huge number": (_file(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
    "NaN": (_file(b'{"a": NaN}'), "NaN"),
    "two values": (_file(b'{},"__metadata__":{"key":"value"}}'), "not JSON"),
    "duplicate tensor": (_file(b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": 1}'), "twice"),
    "duplicate field": (_file(b'{"a": {"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "twice"),
    "metadata of numbers": (_file({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (_file({"__metadata__": []}), "__metadata__"),
    "tensor is a number": (_file({"a": 1}), "needs dtype"),
    "field missing": (_file({"a": {"dtype": "U8", "shape": [0]}}), "needs dtype"),
    "field too many": (_file({"a": {**_t(0, 0), "x": 1}}), "needs dtype"),
    "unknown dtype": (_file({"a": _t(0, 1, dtype="U9")}, b"1"), "is unknown to this p2pcast"),
    "dtype is a list": (_file({"a": _t(0, 1, dtype=["U8"])}, b"1"), "dtype is not text"),
    "shape of floats": (_file({"a": _t(0, 1, [1.0])}, b"1"), "shape"),
    "shape of booleans": (_file({"a": _t(0, 1, [True])}, b"1"), "shape"),
    "negative shape": (_file({"a": _t(0, 1, [-1, -1])}, b"1"), "shape"),
    "too many dims": (_file({"a": _t(0, 1, [1] * 17)}, b"1"), "shape"),
    "overflowing shape": (_file({"a": _t(0, 0, [1 << 40, 1 << 40])}), "larger than"),
    "offsets descend": (_file({"a": _t(1, 0, [0])}, b"1"), "ascending"),
    "negative offsets": (_file({"a": _t(-1, 0, [1])}, b"1"), "ascending"),
    "three offsets": (_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1"), "ascending"),
    "size is not shape × dtype": (_file({"a": _t(0, 3, [2])}, b"123"), "3 bytes, but"),
    "overlap": (_file({"a": _t(0, 2), "b": _t(1, 3)}, b"123"), "overlaps"),
    "same place": (_file({"a": _t(0, 2), "b": _t(0, 2)}, b"12"), "overlaps"),
    "hole at the start": (_file({"a": _t(1, 2)}, b"12"), "hole"),
    "hole": (_file({"a": _t(0, 1), "b": _t(2, 3)}, b"123"), "hole"),
    "one byte short": (_file({"a": _t(0, 3)}, b"12"), "cut short"),
    "one byte too many": (_file({"a": _t(0, 3)}, b"1234"), "left over"),
    "a name too long": (_file({"a" * 1025: _t(0, 0)}), "name longer"),
    "a name of a lone surrogate": (
        _file(b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "not Unicode",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_files_are_refused(tmp_path: Path, name: str) -> None:
    contents, words = ATTACKS[name]
    (tmp_path / "x.safetensors").write_bytes(contents)
    with pytest.raises(IntegrityError, match=words) as caught:
        SafetensorsFile(tmp_path / "x.safetensors")
    assert str(tmp_path) in str(caught.value)


def test_metadata_may_be_null(tmp_path: Path) -> None:
    contents = _file({"__metadata__": None, "a": _t(0, 1)}, b"1")
    (tmp_path / "x.safetensors").write_bytes(contents)
    assert load_numpy(contents)["a"].tobytes() == b"1"
    assert SafetensorsFile(tmp_path / "x.safetensors").header.metadata == {}


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no such file"):
        SafetensorsFile(tmp_path / "x.safetensors")


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(2.5),
        "none": np.zeros((0, 4), dtype=np.int16),
        "b": np.array([True, False]),
    }
    (tmp_path / "m.safetensors").write_bytes(save_numpy(arrays, {"format": "np"}))
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.header.metadata == {"format": "np"}
    assert {t.name: t.shape for t, _ in file.header.tensors} == {n: a.shape for n, a in arrays.items()}
    for tensor, begin in file.header.tensors:
        words = file.words(tensor.word_bytes, begin, tensor.words)
        assert words.tobytes() == arrays[tensor.name].tobytes()
        assert not words.flags.writeable


shapes = st.lists(st.integers(0, 5), max_size=3).map(lambda s: (*s, 8))  # so that packed types fill whole bytes


@given(
    st.dictionaries(
        st.text(max_size=12).filter(lambda s: s != "__metadata__" and not any("\ud800" <= c < "\ue000" for c in s)),
        st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
        max_size=8,
    ),
    st.data(),
)
def test_own_header_round_trip(tensors: dict[str, tuple[str, tuple[int, ...]]], data: st.DataObject) -> None:
    layout = Layout(Tensor(n, d, s) for n, (d, s) in tensors.items())
    head = header_for(layout)
    assert len(head) % 8 == 0
    size = len(head) + layout.nbytes
    header = parse_header(head[8:], size, "x")
    assert tuple(header.tensors) == tuple(zip(layout.tensors, layout.offsets, strict=True))
    assert header.metadata == {"format": "pt"}
    with pytest.raises(IntegrityError):
        parse_header(head[8:], size + data.draw(st.sampled_from([-1, 1])), "x")


def test_safetensors_library_reads_own_header() -> None:
    layout = Layout([Tensor("é", "F32", (2,)), Tensor("b", "I8", (3,)), Tensor("a", "F64", ())])
    contents = header_for(layout) + bytes(range(layout.nbytes))
    assert {n: a.shape for n, a in load_numpy(contents).items()} == {"é": (2,), "b": (3,), "a": ()}


def test_mutated_headers_are_refused_or_consistent() -> None:
    layout = Layout([Tensor("aa", "F32", (2, 3)), Tensor("bb", "BF16", (5,)), Tensor("cc", "U8", ())])
    whole, taken = header_for(layout)[8:], 0
    for seed in range(2000):
        draw, head = random.Random(seed), bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            head[draw.randrange(len(head))] = draw.randrange(256)
        try:
            header = parse_header(bytes(head), 8 + len(head) + layout.nbytes, "x")
        except IntegrityError:
            continue
        taken += 1
        assert sum(t.nbytes for t, _ in header.tensors) == layout.nbytes
    assert 0 < taken < 2000

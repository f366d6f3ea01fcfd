"""Golden payloads pin the decoders: bytes that were once valid must decode to the same words. Notes:
tests/golden/*.hex.

A zstd encoder's output may change with its version, so only payloads without frames pin the encoders too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pcast.codec import cell as codec
from p2pcast.codec.layout import Cell
from p2pcast.codec.squash_cell import squash

FILES = sorted(
    path
    for path in (Path(__file__).parents[2] / "golden").glob("*.hex")
    if path.stem.startswith(("context-", "dense-", "flat-"))
)


def load(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    fields = dict(line.split(": ", 1) for line in lines)
    width = int(fields["word_bytes"])
    old, new = (np.frombuffer(bytes.fromhex(fields[k]), dtype=f"<u{width}") for k in ("old", "new"))
    cell = Cell(0, int(fields["tensor"]), int(fields["start"]), old.size, width, 0, int(fields.get("row_words", 0)))
    return cell, old, new, fields


def test_every_codec_has_a_golden_file():
    names = [path.stem for path in FILES]
    contexts = ["context-bf16", "context-bf16-signs", "context-f16-columns", "context-u8-escape"]
    assert sorted(names) == [
        *contexts,
        "dense-bf16",
        "dense-bf16-raw",
        "flat-bf16-raw",
        "flat-f32-wide-gaps",
        "flat-u8-escapes-zstd",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden_payload_decodes(path):
    cell, old, new, fields = load(path)
    before, after = int(fields["before"], 16), int(fields["after"], 16)
    number, payload = int(fields["codec"]), bytes.fromhex(fields["payload"])
    patch = codec.decode(cell, number, payload, old, before, after)
    target = old.copy()
    codec.apply(patch, target)
    assert target.tolist() == new.tolist()
    if number != codec.CONTEXT:
        assert squash(cell, [(number, payload, before, after)]).after == after


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.endswith("-raw")], ids=lambda p: p.stem)
def test_golden_payload_is_encoded(path):
    cell, old, new, fields = load(path)
    assert fields["encoders_too"] == "yes"
    coded = codec.encode(cell, old, new, codec=codec.CODEC_NAMES[int(fields["codec"])])
    assert coded.payload.hex(" ") == fields["payload"]
    assert (f"{coded.before:016x}", f"{coded.after:016x}") == (fields["before"], fields["after"])

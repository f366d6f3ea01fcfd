from __future__ import annotations

from types import SimpleNamespace

from recorder import blocking

from p2pcast.ground.version import Version
from rollout_node.shadow import base_folder as module
from rollout_node.shadow.base_folder import BaseFolder

LAYOUT = SimpleNamespace(layout_id=b"layout")
CHECKPOINT = SimpleNamespace(layout=lambda: LAYOUT, small_files=lambda: {"config.json": b"{}"})


def whole(*rows):
    return [(Version(0, step), (layout, digest)) for step, layout, digest in rows]


def test_the_folder_is_the_newest_version_with_its_layout_and_digest():
    base = BaseFolder(CHECKPOINT, 7)
    rows = whole((1, b"layout", 7), (2, b"layout", 8), (3, b"layout", 7), (4, b"other", 7))
    assert base.version_among(rows) == Version(0, 3)
    assert base.version_among(whole((2, b"layout", 8))) is None
    assert base.small_files() == {"config.json": b"{}"}


async def test_a_folder_is_read_off_the_loop(monkeypatch, tmp_path):
    monkeypatch.setattr(module.Checkpoint, "open", lambda folder: CHECKPOINT)
    monkeypatch.setattr(module, "state_digest", lambda checkpoint, layout: 7)
    base = await BaseFolder.read(tmp_path, blocking)
    assert (base.checkpoint, base.digest, base.layout) == (CHECKPOINT, 7, LAYOUT)

"""A publisher that keeps its states on a device, for which torch's CPU stands by default. Real hub, real peer."""

from __future__ import annotations

import pytest
import torch

from p2pcast.codec.cell import CONTEXT, FLAT
from tests.support.tensor_device import DEVICE
from trainer_node import Publisher
from trainer_node.sdk import encode, publisher, send
from trainer_node.sdk.snapshot import Rooms

pytestmark = pytest.mark.device

DTYPES = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float32, "d": torch.float8_e4m3fn, "e": torch.int64}


@pytest.mark.parametrize(("codec", "sent"), [("flat", FLAT), ("context", CONTEXT)])
def test_versions_compared_on_a_device(run, states, tmp_path, monkeypatch, codec, sent):
    """Several parts a run, several runs; few words change, then many, then none."""
    monkeypatch.setattr(
        publisher, "Rooms", lambda slots, segments, _, *, pinned: Rooms(slots, segments, DEVICE, pinned=pinned)
    )
    monkeypatch.setattr(encode, "RUN_BYTES", 70_000)
    runs = []
    compare = encode.compare
    monkeypatch.setattr(
        encode, "compare", lambda old, new, parts, sparse: runs.append(len(parts)) or compare(old, new, parts, sparse)
    )
    coded = []
    cell = send._cell
    monkeypatch.setattr(
        send, "_cell", lambda serial, part, codec, *rest: coded.append(codec) or cell(serial, part, codec, *rest)
    )
    draw = torch.Generator().manual_seed(0)
    live = {name: torch.randn(150, 101, generator=draw).to(DEVICE, dtype) for name, dtype in DTYPES.items()}
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    run.hub_up(checkpoints, "--codec", codec)
    run.peer_up("peer")
    changed = []
    with Publisher(run.address, token_file=run.token, base=states.folder(tmp_path / "base", live)) as trainer:
        for step, share in enumerate((0.0, 0.01, 0.6, 0.0)):
            for tensor in live.values():
                words = tensor.view(-1).view(torch.uint8).view(-1, tensor.itemsize)
                words[(torch.rand(words.shape[0], generator=draw) < share).to(DEVICE), 0] ^= 1
            handle = trainer.publish(step, live)
            handle.wait_live(1.0)
            changed.append(handle.durable.changed)
            assert sent in coded or share != 0.01
            assert states.differing(run.installed(step), live) == []
    words = sum(tensor.numel() for tensor in live.values())
    assert 0.005 * words < changed[1] < 0.02 * words
    assert 0.5 * words < changed[2] < 0.7 * words
    assert changed[3] == 0
    assert max(runs) > 1

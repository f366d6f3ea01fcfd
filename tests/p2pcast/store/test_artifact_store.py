"""The store after a restart: artifacts found again, leftovers removed, damaged artifacts left out."""

from __future__ import annotations

import random

import pytest
from artifacts_at_hand import KEY, LAYOUT, again, assembled, made, put

from p2pcast.artifact import RunKey
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore


@pytest.mark.parametrize("seed", range(3))
def test_sealed_artifacts_are_found_after_a_restart(store, seed):
    order = random.Random(seed)
    logs = dict(put(store, kind, step, order=order) for kind, step in (("anchor", 0), ("delta", 1), ("delta", 2)))
    reopened = again(store)
    assert reopened.damaged == []
    assert reopened.artifacts.keys() == {s.id for s in logs}
    assert reopened.newest() == Version(0, 2)
    for stored, log in logs.items():
        found = reopened.artifacts[stored.id]
        assert (found.kind, found.base, found.version, found.path) == (
            stored.kind,
            stored.base,
            stored.version,
            stored.path,
        )
        back = reopened.open_log(found)
        assert back.read(0, len(log)) == log
        at = order.randrange(len(log))
        assert back.read(at, len(log) - at) == log[at:]
        back.close()
        assert sorted(reopened.small_files(stored.version)) == ["conf.json", "sub/tok", "tok.model"]
        if stored.kind == "delta":
            with P2pdFile.open(found.path, KEY.public) as file:
                file.verify_pieces()
    assert list((store.root / "partial").iterdir()) == []


def test_leftovers_are_removed_at_the_start(store):
    log = store.begin(assembled(*made("delta", 1)[:3]).open, LAYOUT)
    log.write(0, [b"half"])
    anchor = store.begin(assembled(*made("anchor", 2)[:3]).open, LAYOUT)
    anchor.write(0, [b"half"])
    unrecorded = store.root / "anchors" / "0.7"
    unrecorded.mkdir()
    (unrecorded / "model.safetensors").write_bytes(b"written without its record")
    reopened = again(store)
    assert list((store.root / "partial").iterdir()) == []
    assert not unrecorded.exists()
    assert reopened.artifacts == {}
    assert reopened.damaged == []
    assert reopened.newest() is None
    log.close()
    anchor.close()


def test_abandoned_log_leaves_no_file(store):
    for kind in ("delta", "anchor"):
        assembly = assembled(*made(kind, 1)[:3])
        log = store.begin(assembly.open, LAYOUT)
        store.abandon(log, assembly.open.artifact)
        assert list((store.root / "partial").iterdir()) == []
        with pytest.raises(LocalError, match="was closed"):
            log.write(0, [b"late"])
        again = store.begin(assembly.open, LAYOUT)  # the name is free again
        store.abandon(again, assembly.open.artifact)


def test_damaged_artifacts_are_listed_and_others_used(store):
    good, _ = put(store, "delta", 1)
    cut, _ = put(store, "delta", 2)
    other, _ = put(store, "delta", 3)
    weights, _ = put(store, "anchor", 4)
    record, _ = put(store, "anchor", 5)
    small, _ = put(store, "anchor", 6)
    whole, _ = put(store, "anchor", 7)
    cut.path.write_bytes(cut.path.read_bytes()[:-9])
    data = bytearray(other.path.read_bytes())
    data[-30] ^= 1
    other.path.write_bytes(bytes(data))
    (weights.path / "model.safetensors").unlink()
    (record.path / "p2pcast-anchor").write_bytes(b"\x92nonsense")
    (small.path / "tok.model").write_bytes(b"short")
    (store.root / "deltas" / "0.9-junk.p2pd").write_bytes(b"")
    reopened = again(store)
    assert reopened.artifacts.keys() == {good.id, whole.id}
    listed = {path for path, _ in reopened.damaged}
    assert listed == {
        cut.path,
        other.path,
        weights.path,
        record.path,
        small.path,
        store.root / "deltas" / "0.9-junk.p2pd",
    }
    assert all(str(path) in why for path, why in reopened.damaged)
    assert all(path.exists() for path in listed), "left in place"


def test_artifacts_of_another_run_are_not_used(store):
    put(store, "delta", 1)
    put(store, "anchor", 2)
    other = ArtifactStore(store.root, RunKey(bytes([6]) * 32).public)
    assert other.artifacts == {}
    assert len(other.damaged) == 2

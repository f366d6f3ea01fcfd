"""The store: what is found again after a restart, what is swept, what is left out, and what retention may take."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact import Assembly, Open, Packer, RunKey, run_id
from p2pcast.artifact.p2pd import HEADER, P2pdFile
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.digest import digest
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.store import retention
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.disk import CALL_BYTES, IOV_MAX
from p2pcast.store.journal import SUFFIX, Kind
from p2pcast.store.log import FileLog
from p2pcast.store.retention import expendable
from p2pcast.store.store import Store, Stored
from p2pcast.version import Version

KEY = RunKey(bytes([5]) * 32)
LAYOUT = Layout([Tensor("a", "BF16", (20, 100)), Tensor("b", "F32", ())], cell_words=500)
PIECE = 1024


def made(kind: str, step: int, *, files=(("conf.json", 300), ("sub/tok", 0), ("tok.model", 2000)), base: int | None = None):
    """(open record, signed batches, manifest, log)."""
    draw = random.Random(f"{kind} {step}")
    record = Open(
        draw.randbytes(16),
        None if kind == "anchor" else Version(0, step - 1 if base is None else base),
        kind,
        LAYOUT.layout_id,
        PIECE,
        run_id(KEY.public),
        Version(0, step),
    )
    packer, log, state = Packer(KEY, record, LAYOUT), b"", 0
    for cell in LAYOUT.cells:
        payload = draw.randbytes(cell.nbytes if kind == "anchor" else draw.randrange(1, 90))
        log += payload
        after = draw.getrandbits(60)
        state += after
        packer.add_cell(cell.index, 1 if kind == "anchor" else 3, payload, 0 if kind == "anchor" else 1, after)
    for path, size in files:
        contents = draw.randbytes(size)
        packer.add_file(path, contents, size, blake3.blake3(contents).digest())
        log += contents
    *batches, manifest = packer.seal(state % 2**64)
    return packer.open_signed, batches, manifest, log


def assembled(open_signed, batches, manifest) -> Assembly:
    assembly = Assembly(open_signed, KEY.public, LAYOUT)
    for batch in batches:
        assembly.add_batch(batch)
    assembly.add_manifest(manifest)
    return assembly


def put(store: Store, kind: str, step: int, *, order: random.Random | None = None, **more) -> tuple[Stored, bytes]:
    """Receive an artifact by piece, in any order, and seal it."""
    *signed, log = made(kind, step, **more)
    assembly = assembled(*signed)
    pieces = list(range(assembly.pieces))
    if order is not None:
        order.shuffle(pieces)
    out = store.begin(assembly.open, LAYOUT)
    for piece in pieces:
        out.write(piece * PIECE, [memoryview(log)[piece * PIECE : (piece + 1) * PIECE]])
    assert out.read(0, len(log)) == log
    stored = store.seal(out, assembly)
    assert out.read(0, len(log)) == log, "still readable"
    out.close()
    return stored, log


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "state", KEY.public)


def again(store: Store) -> Store:
    return Store(store.root, KEY.public)


def open_files(folder: Path) -> list[str]:
    """Of this process, in a folder."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry.path))
    return [link for link in links if link.startswith(str(folder))]


def test_finished_logs_hold_no_descriptors(store):
    """A peer keeps a hundred versions and more."""
    kept = []
    for step in range(1, 4):
        *signed, log = made("delta", step)
        assembly = assembled(*signed)
        out = store.begin(assembly.open, LAYOUT)
        out.write(0, [log])
        assert len(open_files(store.root)) == 1, "written in one go"
        store.seal(out, assembly)
        assert out.read(0, len(log)) == log
        assert open_files(store.root) == []
        kept.append((out, log))
    stored, log = put(store, "anchor", 4)
    back = store.open_log(stored)
    assert back.read(0, len(log)) == log
    assert open_files(store.root) == []
    for out, log in kept:
        assert out.read(3, 5) == log[3:8]
        out.close()
        with pytest.raises(LocalError, match="closed"):
            out.read(0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_sealed_is_found_again(store, seed):
    order = random.Random(seed)
    logs = dict(put(store, kind, step, order=order) for kind, step in (("anchor", 0), ("delta", 1), ("delta", 2)))
    reopened = again(store)
    assert reopened.damaged == []
    assert reopened.artifacts.keys() == {s.id for s in logs}
    assert reopened.newest() == Version(0, 2)
    for stored, log in logs.items():
        found = reopened.artifacts[stored.id]
        assert (found.kind, found.base, found.version, found.path) == (stored.kind, stored.base, stored.version, stored.path)
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


def test_an_anchor_is_an_ordinary_checkpoint_folder(store):
    stored, log = put(store, "anchor", 0)
    checkpoint = Checkpoint.open(stored.path)
    assert checkpoint.layout(cell_words=500).layout_id == LAYOUT.layout_id
    data = b"".join(checkpoint.words(cell).tobytes() for cell in LAYOUT.cells)
    assert data == log[: LAYOUT.nbytes]
    assert checkpoint.small_files() == store.small_files(Version(0, 0))
    assert not (stored.path / ".files").exists()


def test_leftovers_are_swept(store):
    log = store.begin(assembled(*made("delta", 1)[:3]).open, LAYOUT)
    log.write(0, [b"half"])
    anchor = store.begin(assembled(*made("anchor", 2)[:3]).open, LAYOUT)
    anchor.write(0, [b"half"])
    unrecorded = store.root / "anchors" / "0.7"
    unrecorded.mkdir()
    (unrecorded / "model.safetensors").write_bytes(b"written, but its record was not")
    reopened = again(store)
    assert list((store.root / "partial").iterdir()) == []
    assert not unrecorded.exists()
    assert reopened.artifacts == {}
    assert reopened.damaged == []
    assert reopened.newest() is None
    log.close()
    anchor.close()


def test_abandoned(store):
    for kind in ("delta", "anchor"):
        assembly = assembled(*made(kind, 1)[:3])
        log = store.begin(assembly.open, LAYOUT)
        store.abandon(log, assembly.open.artifact)
        assert list((store.root / "partial").iterdir()) == []
        with pytest.raises(LocalError, match="was closed"):
            log.write(0, [b"late"])
        again = store.begin(assembly.open, LAYOUT)  # the name is free
        store.abandon(again, assembly.open.artifact)


def test_damaged_ones_are_listed_and_the_others_used(store):
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
    assert listed == {cut.path, other.path, weights.path, record.path, small.path, store.root / "deltas" / "0.9-junk.p2pd"}
    assert all(str(path) in why for path, why in reopened.damaged)
    assert all(path.exists() for path in listed), "left where they are"


def test_another_runs_artifacts_are_not_used(store):
    put(store, "delta", 1)
    put(store, "anchor", 2)
    other = Store(store.root, RunKey(bytes([6]) * 32).public)
    assert other.artifacts == {}
    assert len(other.damaged) == 2


def test_a_damaged_small_file_is_not_handed_out(store):
    put(store, "delta", 1)
    name = blake3.blake3(store.small_files(Version(0, 1))["conf.json"]).hexdigest()
    (store.root / "files" / name).write_bytes(b"rot")
    with pytest.raises(IntegrityError, match=r"conf\.json.*damaged"):
        store.small_files(Version(0, 1))


def test_small_files_that_lie_about_their_hash_are_not_kept(store):
    *signed, log = made("delta", 1)
    assembly = assembled(*signed)
    out = store.begin(assembly.open, LAYOUT)
    out.write(0, [bytes(len(log))])
    with pytest.raises(IntegrityError, match="does not match its hash"):
        store.seal(out, assembly)
    out.close()
    assert again(store).artifacts == {}


def test_write_anchor(store):
    words = {c.index: np.arange(c.words, dtype=f"<u{c.word_bytes}") for c in LAYOUT.cells}
    digests = np.array([digest(words[c.index], c) for c in LAYOUT.cells], dtype="<u8")
    files = {"config.json": b"{}", "sub/x": b""}
    stored = store.write_anchor(KEY, b"i" * 16, Version(0, 3), LAYOUT, lambda c: words[c.index], digests, files)
    reopened = again(store)
    assert reopened.damaged == []
    found = reopened.artifacts[stored.id]
    assert found.manifest.state == int(digests.sum(dtype="<u8"))
    log = reopened.open_log(found)
    expected = b"".join(words[c.index].tobytes() for c in LAYOUT.cells) + b"{}"
    assert log.read(0, len(expected)) == expected
    for piece in range(found.assembly.pieces):
        size = found.assembly.piece_bytes(piece)
        payload = log.read(piece * found.assembly.open.piece, size)
        assert blake3.blake3(payload).digest() == found.assembly.piece_hash(piece)
    log.close()
    assert reopened.small_files(Version(0, 3)) == files


# -- logs


@given(st.lists(st.integers(0, 400), unique=True, max_size=8).map(sorted), st.randoms())
def test_an_anchor_log_is_one_row_of_bytes(tmp_path_factory, cuts, draw):
    """Written in parts of any size and order, across the border between weights and files; read in any range."""
    *_, log = made("anchor", 1)
    edges = sorted({0, *(len(log) * c // 400 for c in cuts), len(log)})
    parts = list(pairwise(edges))
    draw.shuffle(parts)
    out = AnchorLog(tmp_path_factory.mktemp("anchor") / "a", LAYOUT, create=True)
    try:
        for a, b in parts:
            middle = draw.randint(a, b)
            out.write(a, [log[a:middle], memoryview(log)[middle:b]])
        for _ in range(5):
            a = draw.randint(0, len(log))
            b = draw.randint(a, len(log))
            assert out.read(a, b - a) == log[a:b]
        assert out.read(len(log) - 5, 100, short=True) == log[-5:]
        with pytest.raises(IntegrityError, match="not there"):
            out.read(len(log) - 5, 100)
    finally:
        out.close()


def test_a_finished_anchor_read_past_its_end(store):
    stored, log = put(store, "anchor", 1)
    back = store.open_log(stored)
    assert back.read(len(log) - 5, 100, short=True) == log[-5:]
    with pytest.raises(IntegrityError, match="not there"):
        back.read(len(log) - 5, 6)
    back.close()


def test_a_file_log(tmp_path):
    log = FileLog(tmp_path / "x", len(HEADER), head=HEADER)
    # More of them, and larger ones, than a system call takes.
    parts = [bytes([n % 251]) * (n % 7) for n in range(3 * IOV_MAX)]
    parts += [random.Random(n).randbytes(n) for n in (CALL_BYTES - 1, 0, 2 * CALL_BYTES + 3, 5)]
    log.write(10, parts)
    whole = b"".join(parts)
    assert log.read(10, len(whole)) == whole
    assert log.read(10 + len(whole) - 3, 9, short=True) == whole[-3:]
    with pytest.raises(IntegrityError, match="cut short"):
        log.read(10 + len(whole) - 3, 9)
    with pytest.raises(LocalError, match="exists already"):
        FileLog(tmp_path / "x", 0, head=b"").write(0, [b"y"])
    log.close()
    log.close()
    with pytest.raises(LocalError, match="was closed while it was still needed"):
        log.read(0, 1)


def test_closing_a_log_waits_for_whoever_is_in_it(tmp_path):
    """The number of a file that was closed may be another file's a moment later: a write must never land there."""
    log = FileLog(tmp_path / "x", 0, head=b"")
    inside, may_go, closed = threading.Event(), threading.Event(), threading.Event()
    numbers: list[int] = []

    def use() -> None:
        with log.descriptor() as fd:
            inside.set()
            may_go.wait(10)
            with (tmp_path / "other").open("wb") as other:
                numbers.extend([fd, other.fileno()])

    thread = threading.Thread(target=use)
    thread.start()
    assert inside.wait(10)
    log.close()
    closed.set()
    may_go.set()
    thread.join(10)
    assert numbers[0] != numbers[1], "still ours while it was used"
    with pytest.raises(LocalError), log.descriptor():
        pass


# -- retention


class Item:
    def __init__(self, number: int, base: Version | None, version: Version):
        self.id, self.base, self.version = number.to_bytes(2, "big"), base, version


@st.composite
def histories(draw):
    """Versions with deltas, squashes, anchors and branches, some of it already gone."""
    steps = draw(st.integers(1, 14))
    items, versions = [], [Version(0, 0)]
    items.append(Item(0, None, versions[0]))
    for number in range(1, steps + 1):
        newest = versions[-1]
        if draw(st.integers(0, 9)) == 0:
            base = draw(st.sampled_from(versions))
            version = Version(newest.branch + 1, base.step + 1)
        else:
            base, version = newest, Version(newest.branch, newest.step + 1)
        versions.append(version)
        items.append(Item(number, base, version))
        if draw(st.integers(0, 3)) == 0:
            items.append(Item(100 + number, None, version))
        if draw(st.integers(0, 3)) == 0:
            items.append(Item(200 + number, draw(st.sampled_from([v for v in versions if v < version])), version))
    gone = draw(st.sets(st.sampled_from([i.id for i in items]), max_size=4))
    items = [i for i in items if i.id not in gone]
    return draw(st.permutations(items))


def reachable(items) -> set[Version]:
    """Versions that can be had from nothing."""
    found = {i.version for i in items if i.base is None}
    while more := {i.version for i in items if i.base in found} - found:
        found |= more
    return found


@given(histories(), st.integers(1, 6), st.integers(1, 3))
def test_retention_never_takes_what_the_newest_version_needs(items, deltas, anchors):
    gone = expendable(items, deltas=deltas, anchors=anchors)
    assert len(gone) == len(set(gone)) <= len(items)
    left = [i for i in items if i.id not in gone]
    newest = max((i.version for i in items), default=None)
    if newest is not None:
        assert (newest in reachable(left)) == (newest in reachable(items))
        assert any(i.version == newest for i in left)
    by_version = sorted(items, key=lambda i: i.version)
    for kind, keep in ((False, deltas), (True, anchors)):
        kept = [i for i in left if (i.base is None) == kind]
        every = [i for i in by_version if (i.base is None) == kind]
        assert len(kept) >= min(keep, len(every))
        if every:
            assert every[-1].version in {i.version for i in kept}
    versions = {i.id: i.version for i in items}
    assert [versions[g] for g in gone] == sorted(versions[g] for g in gone), "oldest first"


def test_retention_of_a_plain_run():
    items = [Item(0, None, Version(0, 0))]
    items += [Item(n, Version(0, n - 1), Version(0, n)) for n in range(1, 300)]
    assert expendable(items) == [], "one anchor: everything since then is needed"
    items += [Item(1000 + n, None, Version(0, n)) for n in range(50, 300, 50)]
    gone = expendable(items)
    assert len(gone) == 299 - retention.KEEP_DELTAS
    assert all(int.from_bytes(g, "big") < 200 for g in gone)


def test_retain_removes_files_but_spares(store, monkeypatch):
    monkeypatch.setattr("p2pcast.store.store.expendable", lambda artifacts: [a.id for a in artifacts if a.version.step < 3])
    kept = {step: put(store, "delta", step, files=((f"f{step}", 10 + step),))[0] for step in (1, 2, 3)}
    anchor, _ = put(store, "anchor", 0)
    gone = store.retain(frozenset({kept[2].id}))
    assert {s.id for s in gone} == {kept[1].id, anchor.id}
    assert not kept[1].path.exists()
    assert not anchor.path.exists()
    assert again(store).artifacts.keys() == {kept[2].id, kept[3].id}
    assert [len(store.small_files(Version(0, step))) for step in (1, 2, 3)] == [0, 1, 1]
    assert len(list((store.root / "files").iterdir())) == 2
    assert store.retain(frozenset({kept[2].id})) == []


# -- going on with what an earlier process received


def begun(store, kind, pieces):
    """A receiver that wrote down all records, and these pieces; its process is dead now. (Assembly, log.)"""
    open_signed, batches, manifest, log = made(kind, 1)
    assembly = assembled(open_signed, batches, manifest)
    part = store.begin(assembly.open, LAYOUT, resumable=True)
    part.note([(Kind.OPEN, open_signed), *((Kind.BATCH, b) for b in batches)])
    part.note([(Kind.MANIFEST, manifest)])
    for index in pieces:
        part.write(index * PIECE, [log[index * PIECE : (index + 1) * PIECE]])
    part.close()
    return assembly, log


def resumed(store):
    reopened = Store(store.root, KEY.public, keep_partial=True)
    return reopened, reopened.resume()


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_what_was_half_received_is_gone_on_with(store, kind):
    assembly, log = begun(store, kind, [0, 2])
    reopened, [part] = resumed(store)
    assert [i for i in range(assembly.pieces) if i in part.held] == [0, 2]
    assert part.assembly.complete_directory
    for index in range(assembly.pieces):
        if index not in part.held:
            part.log.write(index * PIECE, [log[index * PIECE : (index + 1) * PIECE]])
    stored = reopened.seal(part.log, part.assembly)
    part.log.close()
    assert list((store.root / "partial").iterdir()) == []
    assert stored.id in again(store).artifacts
    found = again(store).open_log(stored)
    assert found.read(0, len(log)) == log
    found.close()


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_all_of_it_was_there(store, kind):
    assembly, _ = begun(store, kind, range(9))
    reopened, [part] = resumed(store)
    assert part.held.count == assembly.pieces
    reopened.seal(part.log, part.assembly)
    part.log.close()
    assert again(store).damaged == []


def test_a_damaged_piece_is_not_held(store):
    assembly, _ = begun(store, "delta", range(9))
    path = store.root / "partial" / assembly.open.artifact.hex()
    with path.open("r+b") as file:
        file.seek(len(HEADER) + PIECE + 5)
        file.write(b"x")
    _, [part] = resumed(store)
    assert [i for i in range(assembly.pieces) if i not in part.held] == [1]
    part.log.close()


def test_records_that_were_cut_anywhere(store):
    """At whatever byte they end, what is found is a part of the truth, and can be gone on with."""
    assembly, _ = begun(store, "delta", range(9))
    path = store.root / "partial" / f"{assembly.open.artifact.hex()}{SUFFIX}"
    part_path, records = path.with_suffix(""), path.read_bytes()
    contents = part_path.read_bytes()
    held = []
    for cut in [*range(0, len(records), 97), len(records)]:
        path.write_bytes(records[:cut])
        part_path.write_bytes(contents)
        _, found = resumed(store)
        for part in found:
            held.append(part.held.count)
            part.log.note([(Kind.BATCH, b) for b in assembly.signed_batches()] + [(Kind.MANIFEST, assembly.manifest_signed)])
            part.log.close()
            _, [whole] = resumed(store)
            assert whole.assembly.complete_directory
            assert whole.held.count == assembly.pieces
            whole.log.close()
        if not found:
            assert list((store.root / "partial").iterdir()) == []
    assert held == sorted(held)
    assert held[0] == 0
    assert held[-1] == assembly.pieces


def test_records_of_somebody_else_are_not_believed(store):
    begun(store, "delta", range(9))
    other = Store(store.root, RunKey(bytes([6]) * 32).public, keep_partial=True)
    assert other.resume() == []
    assert list((store.root / "partial").iterdir()) == []


def test_a_log_without_records_is_swept_and_the_other_way_round(store):
    assembly, _ = begun(store, "delta", range(9))
    part = store.root / "partial" / assembly.open.artifact.hex()
    part.unlink()
    _, found = resumed(store)
    assert found == []
    assert list((store.root / "partial").iterdir()) == []


def test_an_anchor_that_was_being_replaced_is_put_back(store):
    words = {c.index: np.arange(c.words, dtype=f"<u{c.word_bytes}") for c in LAYOUT.cells}
    digests = np.array([digest(words[c.index], c) for c in LAYOUT.cells], dtype="<u8")
    stored = store.write_anchor(KEY, b"i" * 16, Version(0, 3), LAYOUT, lambda c: words[c.index], digests, {})
    stored.path.rename(store.root / "partial" / "0.3.replaced")
    assert stored.id in again(store).artifacts
    assert list((store.root / "partial").iterdir()) == []


def test_an_anchor_that_is_not_what_its_digests_say_is_not_written(store):
    words = {c.index: np.arange(c.words, dtype=f"<u{c.word_bytes}") for c in LAYOUT.cells}
    digests = np.zeros(len(LAYOUT.cells), dtype="<u8")
    with pytest.raises(IntegrityError, match="is not what its digest says"):
        store.write_anchor(KEY, b"i" * 16, Version(0, 3), LAYOUT, lambda c: words[c.index], digests, {})
    assert list((store.root / "partial").iterdir()) == []
    assert again(store).artifacts == {}

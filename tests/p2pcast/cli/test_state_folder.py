"""``inspect STATE`` and ``check STATE`` on a state folder of a real store and shadow: damaged files are named and
moved, corrupt cells repaired.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, Open, run_id
from p2pcast.cli.inspect import inspect
from p2pcast.cli.state_folder import check
from p2pcast.codec.cell import encode
from p2pcast.codec.digest import MASK, digest
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.store.state_format import state_lock

LAYOUT = Layout([Tensor("a", "BF16", (50, 100)), Tensor("b", "F32", (7,))], cell_words=1000)


def words(seed):
    draw = np.random.default_rng(seed)
    return {c.index: draw.integers(0, 1 << 16, c.words).astype(f"<u{c.word_bytes}") for c in LAYOUT.cells}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A hub's: an anchor, two deltas, and a shadow at the last."""
    root = tmp_path / "state"
    with state_lock(root):
        key = RunKey.load_or_create(root / "run.key")
        (root / "hub.json").write_text(json.dumps({"node": "00" * 16, "incarnation": 3, "target": None}))
        store = ArtifactStore(root, key.public)
        now = words(0)
        digests = np.array([digest(now[c.index], c) for c in LAYOUT.cells], "<u8")
        store.write_anchor(
            key, b"a" * 16, Version(0, 1), LAYOUT, lambda c: now[c.index], digests, {"config.json": b"{}"}
        )
        for step in (2, 3):
            new = {i: w.copy() for i, w in now.items()}
            new[step][5] += 1
            record = Open(
                os.urandom(16),
                Version(0, step - 1),
                DELTA,
                LAYOUT.layout_id,
                limits.PIECE_BYTES,
                run_id(key.public),
                Version(0, step),
            )
            packer, log = Packer(key, record, LAYOUT), store.begin(record, LAYOUT)
            for cell in LAYOUT.cells:
                coded = encode(cell, now[cell.index], new[cell.index])
                if coded is not None:
                    log.write(packer.log_bytes, [coded.payload])
                    packer.add_cell(coded.cell, coded.codec, coded.payload, coded.before, coded.after)
            packer.add_file("config.json", None, 2, store.manifest(Version(0, 1)).files[0].hash)
            now = new
            total = sum(digest(now[c.index], c) for c in LAYOUT.cells) & MASK
            *batches, manifest = packer.seal(total)
            tail = Tail(batches, key.public, LAYOUT.document, manifest, packer.open_signed)
            store.seal(log, tail.assembly(LAYOUT))
            log.close()
        with Shadow.create(tmp_path / "shadow", LAYOUT) as shadow:
            shadow.fill(Version(0, 3), lambda c: now[c.index], total)
    return root


def ran(command, *words, code=0):
    result = CliRunner().invoke(command, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def checked(state, *words, code=0):
    return json.loads(ran(check, state, "--shadow", state.parent / "shadow", "--json", *words, code=code))


def test_inspect_lists_the_contents_and_changes_nothing(state):
    before = {p: p.stat().st_mtime_ns for p in state.rglob("*")}
    found = json.loads(ran(inspect, state, "--json"))
    assert (found["kind"], found["role"], found["version"], found["incarnation"]) == ("state", "hub", "0.3", 3)
    assert [(a["version"], a["base"], a["kind"]) for a in found["artifacts"]] == [
        ("0.1", None, "anchor"), ("0.2", "0.1", "delta"), ("0.3", "0.2", "delta"),
    ]  # fmt: skip
    assert found["sizes"]["deltas"] > 0
    assert found["faults"] == []
    assert {p: p.stat().st_mtime_ns for p in state.rglob("*")} == before
    with state_lock(state):  # a daemon is running
        assert "0.3" in ran(inspect, state)


def test_a_sound_folder(state):
    found = checked(state)
    assert found["faults"] == []
    assert found["shadow"]["cells"] == 0
    assert "3 artifacts" in ran(check, state, "--shadow", state.parent / "shadow")


@pytest.mark.parametrize("what", ["delta", "anchor", "record", "file"])
def test_check_names_and_moves_damaged_files(state, what):
    path = {
        "delta": next((state / "deltas").glob("0.2-*")),
        "anchor": state / "anchors" / "0.1" / "model.safetensors",
        "record": state / "anchors" / "0.1" / "p2pcast-anchor",
        "file": next((state / "files").iterdir()),
    }[what]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    found = checked(state, code=3)
    top = path if what in ("delta", "file") else path.parent
    assert [f["path"] for f in found["faults"]] == [str(top)]
    assert str(top) in found["faults"][0]["reason"]
    repaired = checked(state, "--repair", code=3)
    assert repaired["set_aside"] == [str(state / "damaged" / top.name)]
    assert (state / "damaged" / top.name).exists()
    assert not top.exists()
    left = checked(state, code=3)
    assert left["faults"] == []
    assert (left["gap"] is None, left["missing_files"]) == ((True, ["config.json"]) if what == "file" else (False, []))
    text = ran(check, state, "--shadow", state.parent / "shadow", code=3)
    assert "publish the next version" in text
    assert "are sound" not in text


def test_check_repairs_damaged_cells(state):
    weights = state.parent / "shadow" / "model.safetensors"
    good = weights.read_bytes()
    with weights.open("r+b") as file:
        file.seek(-500, 2)
        file.write(b"rotten")
    found = checked(state, code=3)
    assert found["shadow"]["cells"] == 1
    assert "are damaged" in found["shadow"]["note"]
    assert checked(state, "--repair")["shadow"]["healed"]
    assert weights.read_bytes() == good
    assert checked(state)["shadow"]["cells"] == 0


def test_check_leaves_irreparable_cells_to_the_daemon(state):
    for path in (state / "anchors").iterdir():
        shutil.rmtree(path)
    with (state.parent / "shadow" / "model.safetensors").open("r+b") as file:
        file.seek(-500, 2)
        file.write(b"rotten")
    found = checked(state, "--repair", code=3)["shadow"]
    assert (found["cells"], found["left"], found["healed"]) == (1, 1, False)
    assert "1 not restored: the daemon rebuilds the shadow" in found["note"]


def test_check_errors_are_one_line(state, tmp_path):
    with state_lock(state), pytest.raises(LocalError, match="is in use by another p2pcast daemon"):
        checked(state)
    (tmp_path / "other").mkdir()
    with pytest.raises(LocalError, match="is not a state folder of a hub or a peer"):
        ran(check, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
    with pytest.raises(LocalError, match="there is no such file"):
        ran(check, tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "shadow")
    assert "the daemon rebuilds the shadow" in checked(state)["shadow"]["note"]


@pytest.mark.root
def test_a_store_that_may_not_be_written_is_one_clear_error_and_nothing_is_lost(state):
    key = RunKey.load_or_create(state / "run.key")
    newest = ArtifactStore(state, key.public).newest()
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own folder is closed to others
        os.chmod(place, 0o755)
        mine = Path(shutil.copytree(state, Path(place) / "state"))
        (mine / "partial" / ("0" * 32)).touch()
        (mine / "lock" / "daemon").unlink()
        for path in (mine, *mine.rglob("*")):
            os.chown(path, 65534, 65534)
            if path.is_dir():
                path.chmod(0o500)
        os.seteuid(65534)
        try:
            with pytest.raises(LocalError, match=r"cannot clean .*partial.*: permission denied"):
                ArtifactStore(mine, key.public)
            with (
                pytest.raises(LocalError, match=r"cannot create .*state.lock.daemon: permission denied"),
                state_lock(mine),
            ):
                pass
        finally:
            os.seteuid(0)
        assert ArtifactStore(mine, key.public).newest() == newest


@pytest.mark.root
def test_a_file_system_that_is_read_only_is_one_clear_error_and_nothing_is_lost(state, tmp_path):
    key = RunKey.load_or_create(state / "run.key")
    place = tmp_path / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=True)
    try:
        mine = Path(shutil.copytree(state, place / "state"))
        (mine / "partial" / ("0" * 32)).touch()
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        with pytest.raises(LocalError, match=r"cannot clean .*partial.*: the file system is read-only"):
            ArtifactStore(mine, key.public)
        with (
            pytest.raises(LocalError, match=r"cannot create .*state.lock.daemon: the file system is read-only"),
            state_lock(mine),
        ):
            pass
        assert "0.3" in ran(inspect, mine)
        subprocess.run(["mount", "-o", "remount,rw", place], check=True)
        assert str(ArtifactStore(mine, key.public).newest()) == "0.3"
    finally:
        subprocess.run(["umount", "-l", place], check=True)

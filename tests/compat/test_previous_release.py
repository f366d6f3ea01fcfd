"""This release beside the previous one, as processes over loopback. Each refuses the other with one line that says what
to update. The previous release refuses a state folder of this release before changing anything.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path

import pytest
from history import HEAD, state, step, write
from previous import FOLDER, RELEASE, Daemon, address_of

from tests.support.until import wait_until

REFUSED = 3


def one_error(daemon: Daemon) -> str:
    """The line that it ended with."""
    assert "Traceback" not in daemon.text, daemon.text
    lines = [line for line in daemon.text.splitlines() if line.startswith("p2pcast: ")]
    assert len(lines) == 1, daemon.text
    return lines[0]


def golden(folder: Path, *names: str) -> None:
    for name in names:
        with tarfile.open(FOLDER / "states" / RELEASE / f"{name}.tar.xz") as tar:
            tar.extractall(folder / name, filter="data")
    shutil.copy(folder / "hub" / "token", folder / "token")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


LINKS = pytest.mark.parametrize(
    "links", [pytest.param((), id="tls"), pytest.param(("--plaintext",), id="plaintext", marks=pytest.mark.prove)]
)


@LINKS
def test_a_previous_peer_is_told_to_update(releases, links) -> None:
    hub = releases.hub("this", *links)
    peer = releases.peer(RELEASE, "peer", address_of(hub), *links)
    assert peer.ended() == REFUSED
    said = one_error(peer)
    assert re.search(
        r"the other side says: the hub \(p2pcast \S+\) speaks protocol 2, the peer protocol 1: "
        r"update p2pcast on the peer",
        said,
    )
    hub.said(r"refused a connection from 127\.0\.0\.1: the hub .* update p2pcast on the peer")
    releases.peer(RELEASE, "second", address_of(hub), *links).ended()
    assert hub.end() == 0
    assert hub.text.count("refused a connection from") == 1
    assert "Traceback" not in hub.text


@LINKS
def test_a_previous_hub_is_named_as_the_side_to_update(releases, links) -> None:
    hub = releases.hub(RELEASE, *links)
    peer = releases.peer("this", "peer", address_of(hub), *links)
    assert peer.ended() == REFUSED
    said = r"p2pcast: the hub speaks protocol 1, this peer \(p2pcast \S+\) protocol 2: update p2pcast on the hub"
    assert re.fullmatch(said, one_error(peer))
    # The previous hub has lost nothing by it.
    assert releases.peer(RELEASE, "old", address_of(hub), *links).said("joined run")
    assert hub.end() == 0
    assert "Traceback" not in hub.text


@pytest.mark.prove  # test_a_previous_peer_is_told_to_update is the sample
def test_previous_peers_of_a_hub_that_was_updated_end_and_say_why(releases) -> None:
    """The peers hold certificates, one runs during the update, and none retries forever."""
    golden(releases.folder, "hub", "peer")
    hub = releases.hub(RELEASE)
    address = address_of(hub)
    running = releases.peer(RELEASE, "peer", address)
    running.said("joined run")
    assert hub.end() == 0
    hub = releases.hub("this", listen=address)
    assert running.ended() == REFUSED
    assert "update p2pcast on the peer" in one_error(running)
    again = releases.peer(RELEASE, "peer", address)
    assert again.ended() == REFUSED
    assert hub.end() == 0
    # Updated in its turn, the same peer goes on with the same folder and the same certificate.
    hub = releases.hub("this", listen=address)
    peer = releases.peer("this", "peer", address)
    write(releases.folder / "checkpoints" / f"step_{step(HEAD) + 1}", state(HEAD))
    wait_until(
        lambda: (releases.folder / "peer-out" / f"step_{step(HEAD) + 1}" / "STABLE").exists(),
        "the next version is installed",
    )
    assert peer.end() == hub.end() == 0


@pytest.mark.prove  # test_a_previous_hub_is_named_as_what_to_update is the sample
def test_a_peer_of_this_release_ends_when_its_hub_goes_back(releases) -> None:
    """To a copy of its state folder from before the upgrade: the folder itself is closed to the previous release."""
    golden(releases.folder, "hub", "peer")
    shutil.copytree(releases.folder / "hub", releases.folder / "before")
    hub = releases.hub("this")
    address = address_of(hub)
    peer = releases.peer("this", "peer", address)
    peer.said("joined run")
    assert hub.end() == 0
    shutil.move(releases.folder / "hub", releases.folder / "after")
    shutil.move(releases.folder / "before", releases.folder / "hub")
    old = releases.hub(RELEASE, listen=address)
    assert peer.ended() == REFUSED
    assert "update p2pcast on the hub" in one_error(peer)
    assert old.end() == 0


@pytest.mark.parametrize("name", ["hub", pytest.param("peer", marks=pytest.mark.prove)])
def test_a_downgrade_is_refused_before_anything_is_changed(releases, name: str) -> None:
    golden(releases.folder, "hub", "peer")
    hub = releases.hub("this")
    releases.peer("this", "peer", address_of(hub)).said("joined run")
    for daemon in reversed(releases.daemons):
        assert daemon.end() == 0
    before = contents(releases.folder / name)
    previous = releases.hub(RELEASE) if name == "hub" else releases.peer(RELEASE, "peer", "127.0.0.1:1")
    assert previous.ended() == 1
    assert re.fullmatch(r"p2pcast: cannot create \S+/lock: it is a folder, not a file", one_error(previous))
    checked = releases.run(RELEASE, "check", "--repair", releases.folder / name)
    assert (checked.returncode, checked.stdout) == (1, "")
    assert contents(releases.folder / name) == before
    [note] = (releases.folder / name / "lock").glob("*.txt")
    assert "Use p2pcast 0.2 or later" in note.read_text()


def test_a_state_that_was_only_looked_at_still_belongs_to_the_previous_release(releases) -> None:
    golden(releases.folder, "hub", "peer")
    before = contents(releases.folder / "hub")
    for words in (("check", releases.folder / "hub"), ("inspect", releases.folder / "hub")):
        assert releases.run("this", *words).returncode == 0
    assert {k: v[0] for k, v in contents(releases.folder / "hub").items()} == {k: v[0] for k, v in before.items()}
    hub = releases.hub(RELEASE)
    address_of(hub)
    assert hub.end() == 0

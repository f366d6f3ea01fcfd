"""State folders and a mirror written by earlier releases (tests/compat/states): this release continues each run and
loses nothing.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "compat"))  # history

from history import FILES, HEAD, VERSIONS, state, step

from p2pcast.artifact.run_key import RunKey
from p2pcast.ground.version import Version
from p2pcast.inspection.store_inspection import survey
from p2pcast.state.version_reader import replay_to
from rollout_node.peer import Peer

STATES = Path(__file__).parents[2] / "compat" / "states"
RELEASES = [p.name for p in sorted(STATES.iterdir()) if p.is_dir()]


@pytest.fixture(params=RELEASES)
def golden(swarm, request):
    """The swarm's folder as a run of that release left it, stopped: ``hub``, ``peer`` and ``mirror``."""
    for name in ("hub", "peer", "mirror"):
        with tarfile.open(STATES / request.param / f"{name}.tar.xz") as tar:
            tar.extractall(swarm.folder / name, filter="data")
    (swarm.folder / "token").write_text((swarm.folder / "hub" / "token").read_text())
    swarm.plaintext = False
    for version in VERSIONS:
        swarm.steps[step(version)] = (state(version), FILES)
    return swarm


def artifacts(folder: Path) -> set[tuple[str, str | None, str]]:
    """Version, base and kind of each; every byte of them was read and compared with what was signed."""
    found = survey(folder, deep=True)
    assert found.faults == []
    return {(str(i.version), None if i.base is None else str(i.base), i.kind) for i in found.items}


def tokens_used(swarm) -> dict[str, int]:
    return {ident: grant.used for ident, grant in swarm.hub.state.admission.trust.ledger.tokens.items()}


async def follower(swarm) -> Peer:
    """A new peer that knows the mirror alone."""
    return await swarm.peer_up("far", hub=None, mirror=f"file://{swarm.folder / 'mirror'}")


async def test_a_hub_goes_on_in_the_same_run(golden, states):
    swarm, folder = golden, golden.folder / "hub"
    before, key = artifacts(folder), RunKey.load_or_create(folder / "run.key").public
    assert {kind for *_, kind in before} == {"anchor", "delta"}
    assert ("0.5", "0.1", "delta") in before  # a squash
    hub = await swarm.hub_up()
    assert hub.state.key.public == key
    assert hub.state.state_file["incarnation"] == 2
    assert str(hub.state.store.newest()) == HEAD
    assert hub.state.store.damaged == []
    for version in VERSIONS:
        way = replay_to(Version.parse(version), [h for h in hub.node.holdings.values() if h.finished])
        assert way is not None, version
    new = states.trained(state(HEAD), 1, 0.05)
    swarm.publish(step(HEAD) + 1, new, FILES)
    await swarm.published(f"1.{step(HEAD) + 1}")
    await swarm.peer_up("new")
    await swarm.live(f"1.{step(HEAD) + 1}")
    await swarm.all_down()
    assert before < artifacts(folder)
    assert len(artifacts(folder) - before) >= 1


async def test_a_hub_remembers_tokens_and_evictions(golden):
    hub = await golden.hub_up()
    ledger = hub.state.admission.trust.ledger
    assert ("trainer", False, 3) in [(g.role, g.revoked, g.uses) for g in ledger.tokens.values()]
    assert [g.role for g in ledger.tokens.values() if g.revoked] == ["peer"]
    thief, _ = hub.state.admission.trust.evictions.find("thief")
    assert hub.state.admission.evicted == {thief}
    assert [h.name for n, h in ledger.holders.items() if n != thief.hex()] == ["peer"]


async def test_a_peer_goes_on_with_its_name_and_its_state(golden, states):
    swarm, folder = golden, golden.folder / "peer"
    held, node = artifacts(folder), survey(folder).record["node"]
    await swarm.hub_up()
    used = tokens_used(swarm)
    peer = await swarm.peer_up("peer")
    await swarm.live(HEAD)
    assert peer.ident.hex() == node
    assert tokens_used(swarm) == used  # the certificate counts, so no token is spent
    new = states.trained(state(HEAD), 1, 0.05)
    swarm.publish(step(HEAD) + 1, new, FILES)
    await swarm.live(f"1.{step(HEAD) + 1}")
    await swarm.all_down()
    assert held < artifacts(folder)


async def test_a_mirror_is_followed_and_gone_on_with(golden, states):
    swarm = golden
    await follower(swarm)
    await swarm.live(HEAD)
    await swarm.hub_up(mirror=f"file://{swarm.folder / 'mirror'}")
    swarm.publish(step(HEAD) + 1, states.trained(state(HEAD), 1, 0.05), FILES)
    await swarm.mirrored(f"1.{step(HEAD) + 1}")
    await swarm.live(f"1.{step(HEAD) + 1}")

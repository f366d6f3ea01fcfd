"""slime's hook after a write, with a real hub and a real peer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2pcast.checkpoint.folder_form import STABLE, FolderForm, StepNames
from p2pcast.ground.errors import RetryableError, UsageError
from tests.daemons.conftest import State, Swarm, differing, first_state, read, trained, write
from trainer_node.frameworks import slime

FORM = FolderForm(StepNames.parse("weight_v{step:06}"))


def written(swarm: Swarm, number: int, state: State) -> Path:
    """As slime writes it: in place, without a marker."""
    folder = write(swarm.checkpoints / f"weight_v{number:06}", state)
    (folder / STABLE).unlink()
    return folder


async def test_engines_have_the_folder_when_the_hook_returns(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that starts again begins with its first folder."""
    await swarm.hub_up(folder_form=FORM)
    await swarm.peers_up("a", "b", folder_form=FORM)
    monkeypatch.setenv(slime.HUB, "http://{}:{}/".format(*swarm.hub.control.http.address))
    for number, seed in ((1, 1), (2, 2), (1, 3)):
        state = trained(first_state(), seed)
        folder = written(swarm, number, state)
        await asyncio.to_thread(slime.publish_folder, None, str(folder), [])
        for name in ("a", "b"):
            assert differing(read(swarm.out(name) / folder.name), state) == []


async def test_other_ranks_do_nothing(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime, "_rank", lambda: 1)
    folder = written(swarm, 1, first_state())
    slime.publish_folder(None, str(folder), [])
    assert not (folder / STABLE).exists()


async def test_a_hook_that_waits_in_vain_says_so(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    await swarm.hub_up(folder_form=FORM)
    folder = written(swarm, 1, first_state())
    other = write(swarm.checkpoints / "step_1", first_state())
    monkeypatch.setenv(slime.HUB, "http://127.0.0.1:1")
    with pytest.raises(RetryableError, match=r"cannot reach the daemon at http://127\.0\.0\.1:1"):
        await asyncio.to_thread(slime.publish_folder, None, str(folder), [])
    monkeypatch.setenv(slime.HUB, "http://{}:{}".format(*swarm.hub.control.http.address))
    monkeypatch.setenv(slime.TIMEOUT, "soon")
    with pytest.raises(UsageError, match=r"P2PCAST_LIVE_TIMEOUT_S='soon' is not a number"):
        await asyncio.to_thread(slime.publish_folder, None, str(folder), [])
    monkeypatch.setenv(slime.TIMEOUT, "0.5")
    with pytest.raises(RetryableError, match=r"weight_v000001 is not live after 0\.5 s|version 0\.1 is not live"):
        await asyncio.to_thread(slime.publish_folder, None, str(folder), [])
    await swarm.peer_up("a", folder_form=FORM)
    monkeypatch.setenv(slime.TIMEOUT, "30")
    await asyncio.to_thread(slime.publish_folder, None, str(folder), [])
    monkeypatch.setenv(slime.TIMEOUT, "0.5")
    monkeypatch.setenv(slime.HOSTS, "2")
    with pytest.raises(RetryableError, match=r"weight_v000001: 1 of 2 hosts have version 0\.1"):
        await asyncio.to_thread(slime.publish_folder, None, str(folder), [])
    with pytest.raises(UsageError, match="does not match --step-names"):
        await asyncio.to_thread(slime.publish_folder, None, str(other), [])

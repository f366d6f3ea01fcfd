"""Names and markers of other frameworks, in the trainer's folder and in the peers' folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, StepNames
from p2pcast.ground.version import Version
from tests.daemons.conftest import Swarm, differing, first_state, read, trained, write

SLIME = FolderForm(StepNames.parse("weight_v{step:06}"), MARKERS["none"])
PRIME_RL = FolderForm(marker=MARKERS["prime-rl"])


def handshake(folder: Path, *stages: str) -> None:
    for stage in stages:
        (folder / stage).touch()


async def waited(swarm: Swarm, folder: str, **query: str) -> tuple[int, dict[str, Any]]:
    words = "".join(f"&{name}={value}" for name, value in query.items())
    code, text = await swarm.get(swarm.hub, f"/wait?folder={folder}{words}")
    return code, json.loads(text)


async def test_a_folder_is_waited_for_by_its_content(swarm: Swarm) -> None:
    """A trainer that starts again counts from its first step: the earlier step's version does not answer for it."""
    first, state = first_state(), first_state(9)
    await swarm.hub_up(folder_form=SLIME)
    await swarm.peer_up("a")
    code, answer = await waited(swarm, "weight_v000001", timeout_s="0")
    assert (code, answer["version"]) == (408, None)
    assert "folder weight_v000001 is not live after 0 s" in answer["error"]
    write(swarm.checkpoints / "weight_v000001", first)
    code, answer = await waited(swarm, "weight_v000001")
    assert (code, answer["version"]) == (200, "0.1")
    write(swarm.checkpoints / "weight_v000002", trained(first, 2))
    assert (await waited(swarm, "weight_v000002", what="published"))[1]["version"] == "0.2"
    write(swarm.checkpoints / "weight_v000001", state)
    code, answer = await waited(swarm, "weight_v000001")
    assert (code, answer["version"]) == (200, "1.1")
    assert [p.committed for p in swarm.peers.values()] == [Version(1, 1)]
    write(swarm.checkpoints / "weight_v000001", state)
    assert (await waited(swarm, "weight_v000001"))[1]["version"] == "1.1", "the same weights, saved again"
    await swarm.down(swarm.hub)
    await swarm.hub_up(folder_form=SLIME)
    assert (await waited(swarm, "weight_v000002", what="published"))[1]["version"] == "0.2"


@pytest.mark.parametrize("name", ["step_1", "weight_v1", "..", "../weight_v000001", ""])
async def test_other_names_are_refused(swarm: Swarm, name: str) -> None:
    await swarm.hub_up(folder_form=SLIME)
    code, answer = await waited(swarm, name)
    assert code == 400
    assert "--step-names weight_v{step:06}" in answer["error"]


async def test_hubs_without_folders_and_peers_say_so(swarm: Swarm) -> None:
    await swarm.hub_up(checkpoints=None)
    peer = await swarm.peer_up("a")
    assert "no folder of checkpoints" in (await waited(swarm, "step_1"))[1]["error"]
    assert "only a hub knows folders" in (await swarm.get(peer, "/wait?folder=step_1"))[1]


@pytest.mark.parametrize("form", [SLIME, PRIME_RL, FolderForm()])
async def test_a_peer_writes_folders_of_the_form_that_its_readers_know(swarm: Swarm, form: FolderForm) -> None:
    """The trainer's folders may have another form."""
    state = first_state()
    await swarm.hub_up(folder_form=SLIME)
    peer = await swarm.peer_up("a", folder_form=form, keep=2)
    for step in (1, 2, 3):
        write(swarm.checkpoints / f"weight_v{step:06}", state, {"config.json": b"{}"})
        await swarm.until(lambda step=step: peer.committed == Version(0, step), f"step {step} is live")
        folder = swarm.out("a") / form.names.name(step)
        assert differing(read(folder), state) == []
        assert (folder / form.marker.last).read_text() == f"0.{step}\n"
        state = trained(state, step)
    assert {p.name for p in swarm.out("a").iterdir()} == {"latest", *(form.names.name(step) for step in (2, 3))}
    await swarm.down(peer)
    peer = await swarm.peer_up("a", folder_form=form, keep=2)
    await swarm.until(lambda: peer.committed == Version(0, 3), "the restarted peer finds its folder")


async def test_a_broadcast_of_prime_rl_is_taken_after_its_last_marker(swarm: Swarm) -> None:
    """The receiver acknowledges while the folder is empty; the trainer writes the weights in place, and not by a
    rename.
    """
    state = first_state()
    await swarm.hub_up(folder_form=PRIME_RL)
    peer = await swarm.peer_up("a", folder_form=PRIME_RL)
    for step in (1, 2):
        folder = swarm.checkpoints / f"step_{step}"
        folder.mkdir()
        handshake(folder, ".sender_ready", ".receiver_ready", ".started")
        weights = (write(swarm.folder / "saved", state) / "model.safetensors").read_bytes()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        handshake(folder, ".finished")
        await swarm.until(lambda step=step: peer.committed == Version(0, step), f"step {step} is live")
        installed = swarm.out("a") / f"step_{step}"
        assert differing(read(installed), state) == []
        assert all((installed / stage).is_file() for stage in (*PRIME_RL.marker.before, ".finished"))
        state = trained(state, step)
    assert swarm.hub.publishing.lifecycle.skipped == {}

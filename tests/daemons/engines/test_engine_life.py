"""Engines that start, stop, lose their weights and switch in turns, and audits of their weights. Real daemons, folders
and commands.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from itertools import pairwise

import pytest

from rollout_node.engine import runner as runner_module

NOTES_TIMES = """
import os, pathlib, sys, time
began = time.monotonic()
time.sleep(0.02)
with open(pathlib.Path(sys.argv[1]), "a") as notes:
    print(os.environ["P2PCAST_VERSION"], began, time.monotonic(), file=notes)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 and os.environ["P2PCAST_VERSION"] == "0.2" else 0)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.05)
    monkeypatch.setattr(runner_module, "CHECK_S", 0.01)


@pytest.fixture
def notes_times(tmp_path):
    """Makes ``exec:`` targets that note when they ran, in a file each; those told to, fail with version 0.2."""
    (tmp_path / "notes.py").write_text(NOTES_TIMES)

    def make(name: str, *more: object) -> str:
        return f"exec:{shlex.join([sys.executable, str(tmp_path / 'notes.py'), str(tmp_path / name), *map(str, more)])}"

    return make


def damage(path) -> None:
    """Flip one bit of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("loss", ["removed", "all removed", "another version", "moved away"])
async def test_a_target_that_lost_its_version_is_refilled_at_once(swarm, states, loss):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    runner, folder = peer.runners[0], swarm.out("a") / "step_1"
    unready: list[bool] = []
    change = peer.startup.hub_session.changed

    def told() -> None:
        unready.append(not runner.ready)
        change()

    peer.engine.engines._report_soon = told
    if loss == "removed":
        shutil.rmtree(folder)
    elif loss == "all removed":
        shutil.rmtree(folder.parent)
    elif loss == "another version":
        (folder / "STABLE").write_text("3.1\n")
    else:
        folder.rename(folder.with_name("aside"))
    await swarm.until(lambda: len(runner.versions) == 2 and runner.ready, "it is installed again")
    assert True in unready  # the hub learned it first
    swarm.check(peer, 1)
    assert str(peer.staged) == "0.1"


async def test_late_and_slow_targets_catch_up(swarm, states, tmp_path):
    """Another process has the folder; once that ends, the version of then goes in."""
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    first = await swarm.peer_up("a")
    second = await swarm.peer_up("b", targets=(f"safetensors:{swarm.out('a')}", f"safetensors:{swarm.out('b')}"))
    await swarm.until(lambda: str(second.runners[1].committed) == "0.1", "the other target is served")
    assert (await swarm.get(second, "/readyz"))[0] == 503
    assert second.committed is None
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2", first)
    await swarm.down(first)
    await swarm.until(lambda: str(second.committed) == "0.2", "it is taken over")
    assert (await swarm.get(second, "/readyz"))[0] == 200
    assert [str(v) for v in second.runners[0].versions] == ["0.2"]


async def test_a_restarted_peer_audits_before_reporting_ready(swarm, states):
    """The folder was damaged meanwhile: the peer repairs its bytes."""
    swarm.publish(1, states.first())
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    await swarm.down(peer)
    damage(swarm.out("a") / "step_1" / "model.safetensors")
    again = await swarm.peer_up("a")
    await swarm.until(lambda: again.runners[0].ready, "it is ready")
    swarm.check(again, 1)


async def test_verify_looks_at_the_engines_own_weights(swarm, states, p2pcast, notes_times):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up(commit="manual")
    folder, command = f"safetensors:{swarm.out('a')}", notes_times("runs")
    peer = await swarm.peer_up("a", targets=(folder, command))
    await swarm.until(lambda: all(str(r.staged) == "0.1" for r in peer.runners), "it is staged")

    async def verify(*words: object):
        return await asyncio.to_thread(p2pcast, "verify", "--live", *words)

    hubs = ("--bearer-file", swarm.folder / "hub" / "http.token")
    peers = ("--bearer-file", swarm.folder / "a" / "http.token")

    here = ("--state", swarm.folder / "a")
    done = await verify(*here)
    assert (done.returncode, "no version is in use" in done.stderr) == (3, True)
    assert (await swarm.post(hub, "/commit", {"version": "0.1"}))[0] == 200
    await swarm.live("0.1")
    await swarm.until(
        lambda: all(p["committed"] == "0.1" for p in hub.control.view.status()["peers"]), "the hub has heard of it"
    )
    swarm.publish(2, states.trained(state, 2))
    await swarm.until(lambda: all(str(r.staged) == "0.2" for r in peer.runners), "the shadow has moved on")

    done = await verify(*here, "--engine", folder, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    expected = {"peer": "a", "name": folder, "version": "0.1", "wrong": [], "unknown": [], "lacks": [], "faults": []}
    assert document == {"ok": True, "engines": [expected | {"state": (await swarm.status(hub))["digests"]["0.1"]}]}
    hub_url = "http://{}:{}".format(*hub.http.address)
    done = await verify("--hub", hub_url, "--json", *hubs)
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (5, False)
    assert f"{command} at a: model" in done.stderr
    found = {e["name"]: (e["wrong"], len(e["unknown"])) for e in json.loads(done.stdout)["engines"]}
    assert found == {folder: ([], 0), command: ([], len(state))}  # a command cannot be audited
    done = await verify("--hub", hub_url, *here)
    assert (done.returncode, "not verified: " in done.stdout, "are not verified" in done.stderr) == (5, True, True)
    assert (await verify("--hub", hub_url, *here, "--engine", folder)).returncode == 0

    damage(swarm.out("a") / "step_1" / "model.safetensors")
    peer_url = "http://{}:{}".format(*peer.http.address)
    done = await verify("--peer", peer_url, "--hub", hub_url, *peers)
    assert done.returncode == 3
    assert f"{folder} at a: tensor 'model.odd' differs from version 0.1" in done.stderr
    assert not peer.runners[0].ready
    assert (await swarm.get(peer, "/readyz"))[0] == 503
    assert (await swarm.post(hub, "/commit", {"version": "0.2"}))[0] == 200
    await swarm.live("0.2")
    assert (await verify(*here, "--engine", folder)).returncode == 0

    for words, code, said in (
        (("--peer", peer_url, "--engine", "no such", *peers), 2, "there is safetensors:"),
        (("--hub", hub_url, "--engine", "no such"), 4, "no peer has"),
        (("--peer", "http://127.0.0.1:9"), 4, "cannot reach"),
        (("--state", swarm.folder), 4, "no daemon"),
        (("--peer", peer_url, "--state", swarm.folder / "a"), 2, "not both"),
        (("--peer", peer_url, "--version", "0.1"), 2, "give no folder"),
        (("--peer", peer_url), 3, str(swarm.folder / "a" / "http.token")),
        (("--peer", peer_url, "--bearer-file", swarm.folder / "nowhere"), 1, "cannot read the bearer file"),
    ):
        done = await verify(*words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert (
        await asyncio.to_thread(p2pcast, "verify", swarm.folder, "--against", hub_url, "--engine", "x")
    ).returncode == 2
    assert (await asyncio.to_thread(p2pcast, "verify")).returncode == 2


async def test_verify_names_a_tensor_that_is_one_version_old(swarm, states, p2pcast):
    """Changes of one version may be smaller than numerics, so probes of the learner may miss such a tensor."""
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    await swarm.until(lambda: str(peer.committed) == "0.1", "it is installed")
    swarm.publish(2, states.trained(state, 1))
    await swarm.live("0.2")
    await swarm.until(lambda: str(peer.committed) == "0.2" and peer.runners[0].ready, "it is ready")
    here = ("--state", swarm.folder / "a")
    assert (await asyncio.to_thread(p2pcast, "verify", "--live", *here)).returncode == 0

    file, old_file = (swarm.out("a") / f"step_{step}" / "model.safetensors" for step in (2, 1))
    data, old = bytearray(file.read_bytes()), old_file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert data[: 8 + size] == old[: 8 + size]
    places = {
        name: slice(8 + size + row["data_offsets"][0], 8 + size + row["data_offsets"][1])
        for name, row in json.loads(data[8 : 8 + size]).items()
        if name != "__metadata__"
    }
    changed = next(name for name, place in places.items() if data[place] != old[place])
    data[places[changed]] = old[places[changed]]
    file.write_bytes(data)
    done = await asyncio.to_thread(p2pcast, "verify", "--live", *here)
    assert done.returncode == 3
    assert done.stderr.count("differs from version") == 1
    assert f"tensor {changed!r} differs from version 0.2" in done.stderr


async def test_verify_reports_a_hub_with_another_digest(swarm, states, p2pcast, monkeypatch):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    await swarm.until(lambda: peer.runners[0].ready, "it is ready")
    view = hub.control.view
    status = view.status
    monkeypatch.setattr(view, "status", lambda: status() | {"digests": {"0.1": "0" * 16}})
    urls = ["http://{}:{}".format(*d.http.address) for d in (peer, hub)]
    mine = ("--bearer-file", swarm.folder / "a" / "http.token")
    done = await asyncio.to_thread(p2pcast, "verify", "--live", "--peer", urls[0], "--hub", urls[1], *mine)
    assert done.returncode == 3
    assert "0000000000000000 at the hub" in done.stderr


async def test_rolling_over_three_engines(swarm, states, tmp_path, notes_times):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    names = ["x", "y", "z"]
    peer = await swarm.peer_up("a", targets=tuple(notes_times(n) for n in names), rolling=1)
    for step in (2, 3):
        await swarm.until(lambda s=step: str(peer.committed) == f"0.{s - 1}", "all engines are there")
        state = states.trained(state, step)
        swarm.publish(step, state)
    await swarm.until(lambda: str(peer.committed) == "0.3", "all engines are there")
    runs = [line.split() for n in names for line in (tmp_path / n).read_text().splitlines()]
    assert sorted(v for v, _, _ in runs) == [f"0.{s}" for s in (1, 2, 3) for _ in names]
    spans = sorted((float(began), float(ended)) for _, began, ended in runs)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


async def test_a_version_that_engines_reject_stops_at_the_first(swarm, states, tmp_path, notes_times):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", targets=tuple(notes_times(n, 5) for n in "xyz"), rolling=1)
    await swarm.until(lambda: str(peer.committed) == "0.1", "all engines are there")
    state = states.trained(state, 2)
    swarm.publish(2, state)
    await swarm.until(lambda: sum(r.waits_for == "turn" for r in peer.runners) == 2, "two engines wait")
    await swarm.until(lambda: any(r.error and "exit status 5" in r.error for r in peer.runners), "one has failed")
    assert sorted(str(r.committed) for r in peer.runners if r.ready) == ["0.1", "0.1"]
    swarm.publish(3, states.trained(state, 3))
    await swarm.until(lambda: str(peer.committed) == "0.3", "the next version mends it")

"""A hub in this process: the stages of its start, its parts' connections, its run and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from parts import FakeLink, ident, node

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.store.state_format import state_lock
from p2pcast.wire.messages import Type
from tests.p2pcast.store.artifacts_at_hand import KEY, put
from tests.support.nothing_left import NothingLeft, StepError, failing, listening_at
from tests.support.until import until
from topology.version_sizes import SMALLEST
from trainer_node import hub as hub_module
from trainer_node import hub_startup
from trainer_node.hub import opened
from trainer_node.hub_config import HubConfig
from trainer_node.membership.membership import DEFAULT_UPLINK_BPS

JOIN: dict[str, Any] = {"name": "a", "region": "r", "listen": ["", 7], "held": None, "engine": None}
REPORT: dict[str, Any] = {"staged": None, "committed": None, "parent": None}


def options(folder, **changes) -> HubConfig:
    given: dict[str, Any] = {
        "checkpoints": None,
        "state": folder / "hub",
        "shadow": folder / "shadow",
        "listen": ("127.0.0.1", 0),
        "http": ("127.0.0.1", 0),
        "plaintext": True,
        "recall_s": 0.0,
    }
    return HubConfig(**given | changes)


def stored(config, *kinds) -> list[Any]:
    """Artifacts in the state folder of a run whose key is ``KEY``."""
    config.state.mkdir(mode=0o700)
    (config.state / "run.key").write_bytes(bytes([5]) * 32)
    (config.state / "run.key").chmod(0o600)
    store = ArtifactStore(config.state, KEY.public)
    return [put(store, kind, step)[0] for step, kind in enumerate(kinds, 1)]


def join(hub, name: str = "a") -> FakeLink:
    """A peer's control connection, which has joined."""
    link = FakeLink(name)
    hello = SimpleNamespace(purpose="control", role="peer", token=b"", name=name, stripes=1)
    hub.control.link_acceptor.accept_link(link, hello)
    link.hears(Type.JOIN, **JOIN | {"name": name})
    return link


# -- state


async def test_a_missing_checkpoint_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"checkpoints \(step_\{step\}/\) are expected"):
        async with opened(options(tmp_path, checkpoints=tmp_path / "none")):
            pass


async def test_a_restarted_hub_continues_its_run(tmp_path):
    found = []
    for _ in range(2):
        async with opened(options(tmp_path)) as hub:
            found.append((hub.token.run, hub.ident, hub.state.state_file["incarnation"]))
    assert found[0][:2] == found[1][:2]
    assert [incarnation for *_, incarnation in found] == [1, 2]


async def test_versions_open_at_once_unless_the_hub_was_restarted(tmp_path):
    for restarted in (False, True):
        async with opened(options(tmp_path)) as hub:
            assert hub.state.recovery.done.is_set() is not restarted


async def test_a_damaged_artifact_is_named_and_ends_no_hub(tmp_path, caplog):
    config = options(tmp_path)
    [artifact] = stored(config, "delta")
    artifact.path.write_bytes(b"damaged")
    async with opened(config) as hub:
        assert hub.node.holdings == {}
    assert f"not used: {artifact.path}" in caplog.text


# -- fleet and versions


async def test_stored_artifacts_are_offered_and_their_sizes_known(tmp_path):
    config = options(tmp_path)
    anchor, delta = stored(config, "anchor", "delta")
    async with opened(config) as hub:
        assert hub.node.holdings.keys() == {anchor.id, delta.id}
        assert hub.fleet.membership.sizes.bytes == SMALLEST


async def test_an_uplink_that_was_stated_is_not_measured(tmp_path):
    async with opened(options(tmp_path)) as hub:
        assert hub.fleet.membership.uplink_bps == DEFAULT_UPLINK_BPS
        hub.control.uplink_meter._measured(5e6)
        assert hub.fleet.membership.uplink_bps == 5e6
    async with opened(options(tmp_path, uplink_bps=3e6)) as hub:
        hub.control.uplink_meter._measured(5e6)
        assert hub.fleet.membership.uplink_bps == 3e6


@pytest.mark.parametrize("mirrored", [False, True])
async def test_only_a_hub_with_a_mirror_uploads(tmp_path, mirrored):
    mirror = f"file://{tmp_path}" if mirrored else None
    async with opened(options(tmp_path, mirror=mirror)) as hub:
        assert (hub.publishing.mirror_uploader is not None) is mirrored


# -- peers


async def test_a_peer_that_joins_is_welcomed_with_the_runs_key_and_catalog(tmp_path):
    config = options(tmp_path)
    stored(config, "anchor")
    async with opened(config) as hub:
        link = join(hub)
        [welcome] = link.bodies(Type.WELCOME)
        assert welcome["key"] == KEY.public
        [catalog] = link.bodies(Type.CATALOG)
        assert len(catalog["artifacts"]) == 1
        assert hub.fleet.membership.peers.keys() == {ident("a")}


async def test_a_report_reaches_every_part_that_follows_peers(tmp_path, monkeypatch):
    async with opened(options(tmp_path)) as hub:
        link, rechecked = join(hub), []
        hub.publishing.live.changed.clear()
        monkeypatch.setattr(hub.publishing.backpressure, "recheck", lambda: rechecked.append(1))
        link.hears(Type.REPORT, **REPORT | {"staged": Version(0, 1)})
        assert hub.fleet.membership.peers[ident("a")].staged == Version(0, 1)
        assert hub.publishing.live.changed.is_set()
        assert rechecked == [1]


async def test_a_peer_that_left_is_no_source_and_no_member(tmp_path):
    async with opened(options(tmp_path)) as hub:
        link, sources = join(hub), hub.fleet.sources
        sources.holds(ident("a"), [b"artifact"])
        assert sources.seek(ident("b"), b"artifact") == [ident("a")]
        link.close()
        assert sources.seek(ident("b"), b"artifact") == []
        assert hub.fleet.membership.peers == {}


async def test_an_eviction_is_sent_to_every_peer(tmp_path):
    async with opened(options(tmp_path)) as hub:
        join(hub, "a")
        other = join(hub, "b")
        other.sent.clear()
        await hub.state.admission.commands.routes["evict"]({"peer": ident("a")})
        [evicted] = other.bodies(Type.EVICTED)
        assert evicted["nodes"] == [node("a")]
        assert hub.state.sessions[ident("a")].farewell


async def test_peers_of_a_hub_that_ends_are_expected_back(tmp_path):
    async with opened(options(tmp_path)) as hub:
        link = join(hub)
    assert link.closed
    async with opened(options(tmp_path)) as hub:
        assert hub.state.recovery._awaited == {ident("a")}


# -- run and end


@contextlib.asynccontextmanager
async def running(config):
    async with opened(config) as hub:
        task = asyncio.create_task(hub.run())
        try:
            await until((config.state / "daemon.json").exists, check=lambda: task.done() and task.result())
            yield hub
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_running_hub_answers_and_holds_its_state_folder(tmp_path):
    config = options(tmp_path, token_file=tmp_path / "token")
    async with running(config) as hub:
        assert (tmp_path / "token").read_text().strip() == str(hub.token)
        assert listening_at(hub.control.listener.address)
        url = json.loads((config.state / "daemon.json").read_text())["http"]
        async with aiohttp.ClientSession() as http, http.get(f"{url}/status") as answer:
            assert (await answer.json())["run"] == hub.token.run.hex()
        with pytest.raises(LocalError, match="in use by another p2pcast daemon"), state_lock(config.state):
            pass


async def test_a_cancelled_hub_leaves_nothing_open(tmp_path):
    config = options(tmp_path)
    stored(config, "anchor", "delta")
    async with NothingLeft(tmp_path), running(config) as hub:
        addresses = hub.control.listener.address, hub.http.address
    assert not any(map(listening_at, addresses))
    assert not (config.state / "daemon.json").exists()
    with state_lock(config.state):
        pass


# -- starts that fail


STEPS = [
    "claim", "RunKey", "StateFile", "PublishHistory", "Admission", "ArtifactStore", "VersionNumbers", "Recovery",
    "Membership", "LeadDirectory", "BroadcastPlanner",
    "VersionSealer", "SealedArtifacts", "HubShadow", "Pipeline", "AnchorsAndSquashes", "MirrorUploader", "Commits",
    "VersionLifecycle", "RankIntake",
    "PlanDistributor", "ReportHandler", "JoinHandler", "Listener", "HubView", "HttpServer",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
async def test_nothing_is_left_open_where_a_step_fails(tmp_path, monkeypatch, step):
    config = options(tmp_path, mirror=f"file://{tmp_path}")
    stored(config, "anchor", "delta")
    replaced = SimpleNamespace(load_or_create=failing) if step == "RunKey" else failing
    monkeypatch.setattr(hub_startup, step, replaced)
    async with NothingLeft(tmp_path):
        with pytest.raises(StepError):
            async with opened(config):
                pass
    with state_lock(config.state):
        pass


@pytest.mark.parametrize("step", ["open_state", "build_fleet", "build_publishing", "build_control"])
async def test_nothing_is_left_open_where_a_stage_fails(tmp_path, monkeypatch, step):
    config = options(tmp_path)
    stored(config, "anchor", "delta")
    monkeypatch.setattr(hub_module, step, failing)
    async with NothingLeft(tmp_path):
        with pytest.raises(StepError):
            async with opened(config):
                pass

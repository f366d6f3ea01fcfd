"""The second phase of a peer's start: its real parts, built and connected; nothing of it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from contextlib import nullcontext

import pytest
from fake_holding import FakeHolding
from recorder import Recorder
from starting_peer import KEY, mirror_in, options, starting

from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node import peer_parts
from rollout_node.control.hub_session import HubSession
from rollout_node.control.run_key_source import KnownRunKey
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.runner import Runner
from rollout_node.peer_parts import build_engines, build_relay, build_sync
from rollout_node.stage.quantised_reader import QuantisedReader
from tests.p2pcast.store.artifacts_at_hand import put
from tests.support.nothing_left import NothingLeft, StepError, failing

NODE, OTHER = b"n" * 16, b"o" * 16
VLLM = "vllm:http://127.0.0.1:1"


def store_in(config) -> ArtifactStore:
    return ArtifactStore(config.state, KEY.public)


@contextlib.asynccontextmanager
async def built(config, key=None):
    """(startup, relay, engines, sync)"""
    async with starting(config) as startup:
        relay = build_relay(startup, KEY.public, store_in(config))
        engine = build_engines(startup, relay)
        yield startup, relay, engine, build_sync(startup, relay, engine, key or KnownRunKey(KEY.public))


# -- relay


async def test_stored_artifacts_are_offered_from_the_start(tmp_path):
    config = options(tmp_path)
    (anchor, _), (delta, _) = put(store_in(config), "anchor", 1), put(store_in(config), "delta", 2)
    async with starting(config) as startup:
        relay = build_relay(startup, KEY.public, store_in(config))
        assert relay.node.holdings.keys() == {anchor.id, delta.id}
        assert all(holding.complete for holding in relay.node.holdings.values())


async def test_without_the_hub_every_artifact_counts_as_listed(tmp_path, monkeypatch):
    async with starting(options(tmp_path)) as startup:
        node = build_relay(startup, KEY.public, store_in(startup.config)).node
        assert node.is_listed(OTHER)
        monkeypatch.setattr(type(startup.hub_session), "connected", True)
        assert not node.is_listed(OTHER)


async def test_an_artifact_on_the_mirror_counts_as_listed(tmp_path, monkeypatch):
    async with starting(options(tmp_path, mirror=mirror_in(tmp_path))) as startup:
        node = build_relay(startup, KEY.public, store_in(startup.config)).node
        monkeypatch.setattr(type(startup.hub_session), "connected", True)
        startup.mirror.catalog.entries[OTHER] = None
        assert node.is_listed(OTHER)


# -- engines


async def test_a_peer_without_a_role_leads_no_engine_and_is_no_member(tmp_path):
    async with built(options(tmp_path)) as (_, _, engine, _):
        assert (engine.lead, engine.member) == (None, None)
        assert [runner.installer.name for runner in engine.engines.runners] == [f"safetensors:{tmp_path / 'out'}"]
        assert engine.may_leave(Version(0, 1))


@pytest.mark.parametrize("name", ["engine", "another"])
async def test_a_lead_takes_the_members_of_its_own_engine_from_the_state(tmp_path, name):
    config = options(tmp_path, targets=(VLLM,), engine=("engine", "lead"))
    (config.state / "peer.json").write_text(json.dumps({"members": [name, [NODE.hex()]]}))
    async with built(config) as (_, _, engine, _):
        refusal = nullcontext() if name == "engine" else pytest.raises(RetryableError, match="has not named")
        with refusal:
            engine.lead.accept(Recorder(remote=NODE), Recorder(role="member"))


async def test_the_lead_drives_the_server_of_an_engine_on_several_hosts(tmp_path):
    async with built(options(tmp_path, targets=(VLLM,), engine=("engine", "lead"))) as (_, _, engine, _):
        assert isinstance(engine.engines.runners[0].installer, MultiHostInstaller)


async def test_reports_of_workers_reach_the_lead(tmp_path):
    async with built(options(tmp_path, targets=(VLLM,), engine=("engine", "lead"))) as (_, _, engine, _):
        assert engine.provider.on_report == [engine.lead.on_report]


async def test_reports_of_workers_reach_the_member(tmp_path):
    async with built(options(tmp_path, targets=(), engine=("engine", "member"))) as (_, _, engine, _):
        assert engine.provider.on_report == [engine.member.report]
        assert engine.engines.runners == []
        assert engine.may_leave(Version(0, 1)) is engine.member.may_leave(Version(0, 1))


async def test_a_new_target_wakes_the_engines_and_is_reported(tmp_path, monkeypatch):
    reports, woken = [], []
    monkeypatch.setattr(HubSession, "changed", lambda session: reports.append(session))
    monkeypatch.setattr(Runner, "wake", lambda runner: woken.append(runner))
    async with built(options(tmp_path)) as (startup, _, engine, _):
        startup.orders.commit_to(Version(0, 1))
        assert woken == engine.engines.runners
        assert reports == [startup.hub_session]


async def test_an_unknown_target_is_refused_and_nothing_is_left_open(tmp_path):
    config = options(tmp_path, targets=("nowhere",))
    put(store_in(config), "anchor", 1)
    async with NothingLeft(tmp_path):
        with pytest.raises(UsageError, match="is not an install target"):
            async with built(config):
                pass


# -- shadow and sync


async def test_without_a_mirror_nothing_is_fetched_from_one(tmp_path):
    async with built(options(tmp_path)) as (_, _, _, sync):
        assert sync.mirror_source is None


async def test_a_listed_mirror_completes_the_catalog_and_is_news(tmp_path):
    async with built(options(tmp_path, mirror=mirror_in(tmp_path))) as (startup, _, _, sync):
        assert not startup.catalog.complete.is_set()
        await sync.mirror_source._list()
        assert startup.catalog.complete.is_set()
        assert sync.freshness.source == "mirror"


async def test_the_age_of_the_newest_stored_version_is_known(tmp_path):
    config = options(tmp_path)
    put(store_in(config), "anchor", 1)
    newest, _ = put(store_in(config), "delta", 2)
    an_hour_ago = time.time() - 3600
    os.utime(newest.path, (an_hour_ago, an_hour_ago))
    async with built(config) as (_, _, _, sync):
        assert sync.freshness.source == "disk"
        assert sync.freshness.age_s(asyncio.get_running_loop().time()) >= 3600


async def test_an_empty_store_has_no_age(tmp_path):
    async with built(options(tmp_path)) as (_, _, _, sync):
        assert sync.freshness.source is None


async def test_wrong_weights_at_an_engine_wake_the_updater(tmp_path):
    async with built(options(tmp_path)) as (_, _, engine, sync):
        woken = asyncio.create_task(sync.planner.news.wait())
        await asyncio.sleep(0)
        engine.wrong_weights.notify()
        await woken


@pytest.mark.parametrize("kind", [None, "fp8-channel"])
async def test_corrupt_cells_put_a_quantising_peers_copy_and_engines_in_doubt(tmp_path, monkeypatch, kind):
    doubted = []
    monkeypatch.setattr(QuantisedReader, "distrust", lambda reader: doubted.append(reader))
    monkeypatch.setattr(Runner, "distrust", lambda runner: doubted.append(runner))
    async with built(options(tmp_path, quantise=kind)) as (_, _, engine, sync):
        sync.stage.check._on_corrupt()
        assert doubted == ([] if kind is None else [engine.shadow, *engine.engines.runners])


async def test_an_opened_artifact_is_news_of_the_newest_version(tmp_path):
    async with built(options(tmp_path)) as (startup, relay, _, sync):
        relay.node_events.on_opened(FakeHolding(1, 2))
        assert sync.freshness.source == "swarm"
        assert [event.kind for event in startup.events.after(0, 10)[1]] == ["receiving"]


@pytest.mark.parametrize("group", ["build_relay", "build_engines", "build_sync"])
@pytest.mark.parametrize("mirrored", [False, True])
async def test_nothing_is_left_open_where_a_group_fails(tmp_path, monkeypatch, group, mirrored):
    config = options(tmp_path, mirror=mirror_in(tmp_path) if mirrored else None)
    put(store_in(config), "anchor", 1)
    last = {"build_relay": "Downloader", "build_engines": "Engines", "build_sync": "Ingest"}[group]
    monkeypatch.setattr(peer_parts, last, failing)
    async with NothingLeft(tmp_path):
        with pytest.raises(StepError):
            async with built(config):
                pass

"""Rivals of `bench broadcast`: each one reaches every peer, rivals without deltas bit for bit; missing packages are
named.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from netem.bench.commands.fleet_commands import RIVALS as OFFERED
from netem.broadcast.dense_rivals import CHANGED, StateSequence, first, stepped
from netem.broadcast.json_lines import carried
from netem.broadcast.rivals import RIVALS, RivalMissingError
from netem.broadcast.shardcast_roles import SETTINGS, settings_for
from netem.broadcast.whole_states import WHOLE
from netem.emulation.description import EmulatedLink, star
from netem.emulation.rate import rate_network

LINK = EmulatedLink(100e6, 100e6)


def test_command_offers_all_rivals() -> None:
    assert set(OFFERED) <= set(RIVALS) | set(WHOLE)


def test_state_steps_are_small_and_reproducible() -> None:
    old = first(200_000)
    new = stepped(old, 1)
    moved = np.flatnonzero(old != new)
    assert moved.size / old.size == pytest.approx(CHANGED, rel=0.1)
    steps = np.abs(old[moved].astype(np.int64) - new[moved])
    assert set(steps) <= {1, 2, 3, 4}
    assert (steps == 1).mean() > 0.85
    assert np.array_equal(new, stepped(first(200_000), 1))
    assert not np.array_equal(new, stepped(old, 2))


def test_no_step_turns_a_sign() -> None:
    edges = np.array([0x0000, 0x8000, 0x7FFF, 0xFFFF] * 5000, np.uint16)
    assert not ((edges ^ stepped(edges, 3)) & 0x8000).any()


def test_state_sequence_saves_the_next_state(tmp_path: Path) -> None:
    states = StateSequence(2000, tmp_path / "state")
    states.next()
    states.save()
    assert np.array_equal(np.fromfile(tmp_path / "state", np.uint16), stepped(first(1000), 1))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_host_without_a_link_has_carried_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netem.broadcast.json_lines.DEVICE", "none such")
    assert carried() == (0, 0)


@pytest.mark.root
@pytest.mark.parametrize(("rival", "command"), [("rsync", "rsync"), ("zstd", None)])
def test_the_whole_state_reaches_every_peer(rival: str, command: str | None, tmp_path: Path) -> None:
    """The function itself compares the bytes with the hub's."""
    if command and shutil.which(command) is None:
        pytest.skip(f"apt-get install {command}")
    with rate_network(star(LINK, 2, LINK)) as net:
        ran = WHOLE[rival](net, 500_000, 2, tmp_path)
    assert all(len(r.times_s) == 2 and min(r.times_s) > 0 for r in ran.rounds)
    assert len(ran.rounds) == 2
    assert 500_000 * CHANGED < ran.settings["moved_bytes"] < 500_000
    assert ran.settings["peer_sent_bytes"] > 0


def test_shards_are_few_over_long_ways() -> None:
    assert settings_for(star(LINK, 2, LINK), 8 << 20) == SETTINGS
    far = star(LINK, 2, EmulatedLink(100e6, 100e6, delay_s=0.02))
    assert settings_for(far, 8 << 20)["SHARDCAST_SHARD_SIZE"] == 4 << 20
    assert settings_for(far, 1000)["SHARDCAST_SHARD_SIZE"] == SETTINGS["SHARDCAST_SHARD_SIZE"]


@pytest.mark.root
def test_shardcast_goes_down_a_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("shardcast", reason="pip install 'p2pcast[rivals]'")
    if shutil.which("wget") is None:
        pytest.skip("apt-get install wget")
    with rate_network(star(LINK, 2, LINK)) as net:
        ran = RIVALS["shardcast"](net, 300_001, 2, 1, tmp_path)
    assert [len(r.times_s) for r in ran.rounds] == [2, 2]
    assert all(max(r.times_s) > (300_001 - 50_000) * 8 / 100e6 for r in ran.rounds)
    assert ran.settings["SHARDCAST_SHARD_SIZE"] == SETTINGS["SHARDCAST_SHARD_SIZE"]
    # shardcast writes to its own folder; each process has a private /tmp.
    assert not Path("/tmp/dummy.bin").exists()


def test_missing_rivals_name_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RivalMissingError, match="apt-get install rsync"):
        WHOLE["rsync"](None, 1, 1, tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RivalMissingError, match="pip install 'p2pcast\\[rivals\\]'"):
        RIVALS["shardcast"](None, 1, 1, 1, tmp_path)  # type: ignore[arg-type]

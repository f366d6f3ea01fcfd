"""One verdict for /status, the page, a replay, readiness and metrics."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from p2pcast.cli.status import table
from p2pcast.fleet_verdict import RANK, judge, known_versions, peer_findings, troubles, unready
from p2pcast.page.fleet_history import FleetHistory
from p2pcast.page.fleet_picture import picture
from p2pcast.page.gone_peers import KEPT, LEFT_SHOWN_S, LOST_SHOWN_S, GonePeers

VERSIONS = [f"0.{step}" for step in range(5)]
AT = 1_700_000_000.0


def engine(**other: Any) -> dict[str, Any]:
    return {"name": "e", "ready": True, "committed": "0.4", "error": None, "waits_for": None} | other


def peer(*engines: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"name": "a", "staged": "0.4", "state": "current", "error": None, "engines": list(engines)} | other


def run(*peers: dict[str, Any], **other: Any) -> dict[str, Any]:
    artifacts = [{"version": version, "kind": "delta", "bytes": 1} for version in VERSIONS]
    return {"role": "hub", "version": "0.4", "artifacts": artifacts, "peers": list(peers)} | other


def printed(status: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=2000).print(table(status))
    return out.getvalue()


LOST = {"name": "a", "node": "aa", "lost": True, "why": "silent", "at": AT}
OWN = {"level": "watch", "words": "waits for a disk"}
STATES = {
    "current": (peer(engine()), "good", "serves 0.4, the newest version"),
    "without engines": (peer(), "good", "has 0.4, the newest version"),
    "on its way": (peer(engine(committed="0.3")), "moving", "e: serves 0.3, 1 version behind 0.4"),
    "waits": (peer(engine(committed="0.3", waits_for="turn")), "moving",
              "e: serves 0.3, 1 version behind 0.4; waits for its turn"),
    "late": (peer(engine(committed="0.1")), "watch", "e: serves 0.1, 3 versions behind 0.4"),
    "on a version of old": (peer(engine(committed="0.0")), "watch", "e: serves 0.0, 4 versions behind 0.4"),
    "on an unknown version": (peer(engine(committed="7.0")), "watch", "e: serves 7.0, which the hub does not know"),
    "without a version": (peer(engine(committed=None)), "watch", "e: serves an unknown version"),
    "unverified": (peer(engine(ready=False, committed=None)), "watch", "e: no verified weights yet"),
    "out of use": (peer(engine(ready=False)), "watch", "e: not fit for requests, with 0.4"),
    "missed a barrier": (peer(engine(ready=False, error="late", waits_for="commit")), "watch",
                         "e: late; waits for the commit"),
    "failed": (peer(engine(ready=False, error="no room")), "alarm", "e: no room"),
    "fails and serves": (peer(engine(committed="0.3", error="no room")), "alarm", "e: serves 0.3; no room"),
    "fails at the newest": (peer(engine(error="no room")), "alarm", "e: serves 0.4; no room"),
    "own error": (peer(engine(), error="wrong base"), "alarm", "wrong base"),
    "own reason": (peer(engine(), unready=[OWN]), "watch", "waits for a disk"),
    "own alarm": (peer(unready=[{"level": "alarm", "words": "no way to 0.4"}]), "alarm", "no way to 0.4"),
    "own reason of no known level": (peer(unready=[{"level": "x", "words": "y"}]), "alarm", "y"),
    "blamed": (peer(engine(), quarantined=True), "alarm", "other peers blame it: data was wrong or withheld"),
    "cut off": (peer(engine(), reachable=False), "watch", "no other peer reaches it, so it only receives"),
    "too slow": (peer(engine(), detached=True), "watch", "too slow to wait for"),
    "empty": (peer(staged=None), "moving", "no version is staged"),
    "ends": (peer(engine(), state="draining"), "moving", "it is ending"),
    "behind without engines": (peer(staged="0.0"), "watch", "has 0.0, 4 versions behind 0.4"),
    "two troubles": (peer(engine(committed="0.3", error="no room"), error="wrong base"), "alarm",
                     "wrong base; e: serves 0.3; no room"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "level", "words"), STATES.values(), ids=STATES)
def test_each_state_has_one_level_and_the_same_words_everywhere(row: dict[str, Any], level: str, words: str) -> None:
    status = judge(run(row))
    verdict = status["peers"][0]["verdict"]
    assert (verdict["level"], verdict["words"]) == (level, words)
    shown = picture(run(row), FleetHistory(), AT)
    assert (shown["peers"]["a"]["level"], shown["peers"]["a"]["words"]) == (level, words)
    assert shown["headline"]["level"] == level == status["verdict"]["level"]
    assert f" {words} " in printed(status)
    assert status["verdict"]["words"] in printed(status)
    if level == "alarm":
        assert status["verdict"]["words"].startswith("1 of 1 peers is in trouble: a.")
    if level in ("watch", "alarm"):
        findings = peer_findings(row, known_versions(status))
        assert words in (unready(findings), troubles(findings))
    assert "All" not in status["verdict"]["words"] or level == "good"


def test_a_banner_counts_troubles_by_the_worst_colour() -> None:
    well, slow = peer(engine(), name="w"), peer(engine(committed="0.0"), name="s")
    failing = peer(engine(committed="0.3", error="no room"), name="f")
    judged = judge(run(well, slow, failing, gone=[LOST | {"name": "l"}]))["verdict"]
    assert judged["level"] == "alarm"
    assert judged["words"] == (
        "1 of 3 peers is in trouble: f. 1 of 3 peers needs a look: s. Lost: l. "
        "2 of 3 engines do not serve 0.4, the newest version, at s, f."
    )
    judged = judge(run(well, gone=[LOST | {"name": "l"}]))["verdict"]
    assert (judged["level"], judged["words"]) == (
        "watch",
        "Lost: l. The joined engine serves 0.4, the newest version.",
    )
    judged = judge(run(peer(engine(), quarantined=True)))["verdict"]
    assert judged["words"].startswith("1 of 1 peers is in trouble: a. The joined engine serves")


def test_page_tells_of_wrong_weights_and_of_probes_that_fail() -> None:
    told = judge(run(peer(engine()), rollouts={"probe_alarm": 1, "probe_missing": 2}))["verdict"]["alarms"]
    assert [(one["level"], one["text"]) for one in told] == [
        ("alarm", "Weights of 1 engines are not those of their version."),
        ("watch", "Probes of 2 engines fail: their weights are not checked."),
    ]
    assert judge(run(peer(engine()), rollouts={"probe_alarm": 0, "probe_missing": 0}))["verdict"]["alarms"] == []


def test_a_gone_peer_is_lost_evicted_or_has_left() -> None:
    when = "2023-11-14 22:13:20 UTC"
    for row, evicted, level, words in [
        (LOST, [], "watch", f"lost since {when}: silent"),
        (LOST, ["aa"], "gone", f"evicted; gone since {when}"),
        (LOST | {"lost": False, "why": None}, [], "gone", f"left at {when}"),
    ]:
        status = judge(run(peer(engine(), name="b"), gone=[row], evicted=evicted))
        verdict = status["gone"][0]["verdict"]
        assert (verdict["level"], verdict["words"]) == (level, words)
        assert words in printed(status)
        assert (status["verdict"]["level"] == "good") == (level == "gone")
        shown = picture(run(peer(engine(), name="b"), gone=[row], evicted=evicted), FleetHistory(), AT)["gone"]
        assert shown["a"]["words"] == words


rows = st.builds(
    engine,
    ready=st.booleans(),
    committed=st.sampled_from([None, "", "x", "0.4", "0.0", "9.9", 3]),
    error=st.sampled_from([None, "", "no room"]),
    waits_for=st.sampled_from([None, "turn", "x", 3]),
)
reasons = st.lists(
    st.fixed_dictionaries({"level": st.sampled_from(["moving", "watch", "alarm", "x"]), "words": st.text()})
)


@given(st.lists(rows, max_size=3), st.sampled_from([None, "", "wrong"]), reasons, st.sampled_from([None, "0.1", "0.4"]))
def test_nothing_unready_or_wrong_is_ever_good(
    engines: list[dict[str, Any]], error: str | None, own: list[dict[str, str]], staged: str | None
) -> None:
    row = peer(*engines, error=error, unready=own, staged=staged)
    status = judge(run(row))
    one, whole = status["peers"][0], status["verdict"]
    wrong = bool(error or own or staged is None or any(e["error"] or not e["ready"] for e in engines))
    wrong = wrong or any(e["committed"] != "0.4" for e in engines)
    assert not (wrong and one["verdict"]["level"] == "good")
    assert RANK[whole["level"]] >= RANK[one["verdict"]["level"]]
    for found in one["engines"]:
        assert found["ready"] or found["verdict"]["level"] not in ("good", "moving")
    if unready(peer_findings(row, known_versions(status))):
        assert one["verdict"]["level"] != "good"
    printed(status)


def test_gone_peers_are_bounded_and_forgotten_in_time() -> None:
    gone = GonePeers()
    gone.left("killed", "00", "silent", 0.0, {"region": "eu"})
    for number in range(2 * KEPT):
        gone.left(f"p{number}", f"{number:02x}x", "", 1.0, {})
    assert len(gone.rows(2.0)) == KEPT
    assert gone.rows(2.0)[-1]["name"] == "killed", "a lost peer outlives peers that left"
    assert [row["name"] for row in gone.rows(2.0 + LEFT_SHOWN_S)] == ["killed"]
    assert gone.rows(1.0 + LOST_SHOWN_S) == []
    gone.joined("another name", "00")
    assert "killed" not in [row["name"] for row in gone.rows(2.0)]
    gone.left("b", "bb", "silent", 2.0, {})
    gone.joined("b", "another node")
    assert "b" not in [row["name"] for row in gone.rows(2.0)]

"""Where all of an engine meet, and what is a worker's report: pure."""

from __future__ import annotations

import contextlib
import random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from rollout_node.engine.multi_host_leader import MemberStanding, meeting, unpack_report

VERSIONS = st.builds(Version, st.integers(0, 2), st.integers(0, 5))
STANDINGS = st.dictionaries(st.sampled_from("abcd"), st.builds(MemberStanding, st.none() | VERSIONS, st.booleans()))


@given(VERSIONS, STANDINGS)
def test_all_meet_where_the_furthest_is(own, members):
    found = meeting(own, members)
    assert found.place == max([own, *(s.version for s in members.values() if s.version is not None)])
    assert set(found.behind) == {n for n, s in members.items() if s.version != found.place or not s.still}
    assert found.met == (own == found.place and all(s == (own, True) for s in members.values()))


@given(st.integers(0, 6), st.lists(st.integers(0, 6), max_size=4), st.integers(0, 1 << 32))
def test_hosts_that_are_behind_move_until_all_meet(own, members, seed):
    """No host at the meeting place moves; the other hosts go forward, sometimes by two versions at once."""
    draw = random.Random(seed)
    standing = {str(i): MemberStanding(Version(0, step), False) for i, step in enumerate(members)}
    for _ in range(200):
        found = meeting(Version(0, own), standing)
        if found.met:
            break
        late = [n for n in found.behind if draw.random() < 0.5]
        if own < found.place.step and draw.random() < 0.5:
            own += 1
        for name in late:
            at = standing[name].version
            assert at is not None
            further = at if at >= found.place else Version(0, at.step + draw.choice([1, 1, 2]))
            standing[name] = MemberStanding(further, further >= found.place)
    assert meeting(Version(0, own), standing).met


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.none() | st.integers(-5, 1 << 60) | st.text(max_size=9) | st.lists(st.integers(0, 9), max_size=3),
    )
)
def test_reports_survive_a_round_trip(report):
    assert unpack_report(msgpack.packb(report)) == report


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x90", b"\x01", b"\x81\x01\x02", b"\x81\xa1a", b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff", b"\x91" * 5000,
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", b"\x81\xa1\xff\x00", b"\x80\x80",
    ],
    ids=lambda d: d[:6].hex(),
)  # fmt: skip
def test_invalid_reports_are_refused(data):
    with pytest.raises(RemoteError, match="a worker's report is not"):
        unpack_report(data)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_report_or_refused(data):
    with contextlib.suppress(RemoteError):
        assert isinstance(unpack_report(data), dict)


def test_a_report_is_not_a_swarm_of_containers(monkeypatch):
    monkeypatch.setattr(limits, "MAX_REPORT_ITEMS", 1000)
    rows = msgpack.packb({"digests": [[]] * 990})
    assert len(unpack_report(rows)["digests"]) == 990
    with pytest.raises(RemoteError):
        unpack_report(msgpack.packb({"digests": [[]] * 1001}))
    with pytest.raises(RemoteError):
        unpack_report(msgpack.packb({"digests": [{}] * 1001}))

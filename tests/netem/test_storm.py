"""Storms: the same again from the same seed, nobody struck twice, never too many out, everybody back in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from netem.storm import ANEW, BACK, BLOWS, KILL, LEAVE, MENDED, Blow, Storm


@given(st.integers(1, 12), st.integers(), st.integers(1, 6), st.integers(0, 60))
def test_storms(peers, seed, most_out, events):
    names = [f"p{n}" for n in range(peers)]
    storm, same = Storm(names, seed, most_out), Storm(names, seed, most_out)
    out: dict[str, str] = {}

    def happened(blow: Blow) -> None:
        if blow.what in BLOWS:
            assert blow.name not in out
            out[blow.name] = blow.what
        else:
            was = out.pop(blow.name)
            assert blow.what in MENDED
            assert blow.what != ANEW or was in (KILL, LEAVE), "only a process that has ended can come back as another"

    for _ in range(events):
        blow = storm.next()
        assert blow == same.next()
        happened(blow)
        assert out == storm.out
        assert len(out) <= most_out
    for blow in storm.calm():
        happened(blow)
    assert out == storm.out == {}


def test_everything_happens():
    storm = Storm([f"p{n}" for n in range(48)], 0, 8)
    assert {storm.next().what for _ in range(200)} == {*BLOWS, BACK, ANEW}

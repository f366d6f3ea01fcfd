"""The experiment `states`: its refusals, and a state sent to all peers by each system."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from netem.broadcast.dense_rivals import rsync_options
from netem.emulation.backend import results
from netem.emulation.description import EmulatedLink, star
from p2pcast.ground.errors import UsageError

WORK = "netem.lab.experiments.states:results"


def argument(**parameters: Any) -> dict[str, Any]:
    hosts = [{"name": "hub", "rate": "100mbit"}, {"name": "p", "count": 2, "rate": "100mbit"}]
    return {"network": {"hosts": hosts}, "events": [], "parameters": {"state_mib": 1, "rounds": 1, **parameters}}


TRIES = 4
"""A busy machine may be too slow for the requested network; the lab then reports that, and nothing else is tested."""


@pytest.mark.parametrize(
    ("parameters", "named"),
    [({"system": "pigeon"}, "system"), ({"state_mib": 0.1}, "state_mib"), ({"legs": 2}, "legs")],
)
def test_invalid_parameters_are_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        list(results("rate", WORK, argument(**parameters)))


def test_rsync_chooses_block_size_with_few_processors() -> None:
    assert any(
        word.startswith("--block-size")
        for word in rsync_options(star(EmulatedLink(1e6, 1e6), 1, EmulatedLink(1e6, 1e6)))
    )
    far = EmulatedLink(1e6, 1e6, delay_s=0.1)
    assert not any(word.startswith("--block-size") for word in rsync_options(star(far, 1, far)))


@pytest.mark.root
@pytest.mark.parametrize("system", ["p2pcast", "zstd"])
def test_every_peer_ends_with_the_hubs_state(system: str) -> None:
    """Other bytes would be an error."""
    for _ in range(TRIES):
        with closing(results("rate", WORK, argument(system=system))) as said:  # type: ignore[type-var]
            calibration, *rest = said
        if not calibration["off"]:
            break
        assert rest == [], "no figure if the network deviates from the request"
    else:
        return
    (row,) = (each["row"] for each in rest)
    assert (row["system"], row["peers"], row["payload_bytes"]) == (system, 2, 1 << 20)
    assert row["all_s"] > 0
    # 1 % of the words changed; a system without deltas moves far more of them.
    assert (row["moved_mb"] < 0.1) == (system == "p2pcast")

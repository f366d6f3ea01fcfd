"""Settings of the backend, as verl hands them over from its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.verl_backend.engine_settings import EngineSettings

GOOD = {"hub": "trainer:7077", "peer": "~/p2pcast-peer"}


def test_hub_and_peer_suffice() -> None:
    settings = EngineSettings.of(GOOD)
    assert (settings.hub, settings.peer, settings.token_file) == ("trainer:7077", "~/p2pcast-peer", None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hubs": "x"}, r"engine_kwargs\.p2pcast\.hubs is unknown: the keys are hub, peer,"),
        ({"hub": None}, r"engine_kwargs\.p2pcast\.hub is missing or no text: give HOST:PORT"),
        ({"peer": ""}, r"engine_kwargs\.p2pcast\.peer is missing or no text: give the state folder"),
        ({"base": 3}, r"engine_kwargs\.p2pcast\.base=3 is no path"),
        ({"plaintext": "yes"}, r"engine_kwargs\.p2pcast\.plaintext='yes' is neither true nor false"),
        ({"wait_s": 0}, r"engine_kwargs\.p2pcast\.wait_s=0 is no number of seconds from 0 to 3600"),
        ({"hold_s": 3601}, r"engine_kwargs\.p2pcast\.hold_s=3601 is no number"),
        ({"hold_s": True}, r"engine_kwargs\.p2pcast\.hold_s=True is no number"),
        ({"wait_s": float("nan")}, r"engine_kwargs\.p2pcast\.wait_s=nan is no number"),
    ],
)
def test_a_wrong_setting_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EngineSettings.of(GOOD | changed)

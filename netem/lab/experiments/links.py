"""The network itself: measured rate, delay and loss of each link and trunk beside the requested ones. One row each;
deviating links have rows too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from netem.emulation.tables import filled
from netem.lab.case_network import emulated

WAYS = ("rate_bps", "rtt_s", "loss")


@dataclass(frozen=True, slots=True)
class Parameters:
    """No parameters."""


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    filled(Parameters, argument["parameters"], "parameters")
    with emulated(argument) as (_, calibrated):
        yield calibrated
    for measured in calibrated["calibration"]:
        asked = {f"asked_{way}": measured[f"asked_{way}"] for way in WAYS}
        row = {"from": measured["from"], "to": measured["to"], **{way: measured[way] for way in WAYS}, **asked}
        yield {"row": row | {"as_asked": not measured["faults"]}}

"""The parameter type of workers on offer: ``rtx5090=0.35:0.28:12``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainer_node.scheduling.worker_fleet_plan import WorkerOffer

_OFFER = re.compile(r"([^=:\s]+)=([0-9.eE+-]+):([0-9.eE+-]+)(?::([0-9]+))?", re.ASCII)


class OfferType(click.ParamType["WorkerOffer"]):
    """KIND=USD_H:RATE[:COUNT]"""

    name = "KIND=USD_H:RATE[:COUNT]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> WorkerOffer:
        from p2pcast.ground.errors import UsageError
        from trainer_node.scheduling.worker_fleet_plan import WorkerOffer

        if isinstance(value, WorkerOffer):
            return value
        match = _OFFER.fullmatch(value)
        if match is None:
            self.fail(f"{value!r}: write {self.name}, as in rtx5090=0.35:0.28:12", param, ctx)
        try:
            return WorkerOffer(match[1], float(match[2]), float(match[3]), int(match[4] or 1))
        except (ValueError, UsageError) as error:
            self.fail(str(error), param, ctx)

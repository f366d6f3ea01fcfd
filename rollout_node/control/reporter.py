"""Messages of a peer to the hub: JOIN with its identity and addresses, REPORT with its progress and changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from p2pcast import limits
from p2pcast.addresses import family_of, may_be_told
from p2pcast.relay.node import Node
from p2pcast.transport.listen_sockets import advertised_hosts, own_hosts
from p2pcast.version import Version
from p2pcast.wire import messages
from rollout_node.control.hub_session import HubSession
from rollout_node.sync.transfers import Transfers


def join_body(
    name: str,
    region: str,
    listen: tuple[str, int],
    advertise: tuple[tuple[str, int], ...],
    port: int,
    own_host: str,
    staged: Version | None,
    engine: tuple[str, str] | None,
) -> messages.Join:
    """``port``: where this peer listens; ``own_host``: the address from which this peer reached the hub. ``engine``:
    name and role, for a host of an engine on several hosts.
    """
    own = [host for host in dict.fromkeys([own_host, *own_hosts()]) if may_be_told(host)]
    addresses = advertise or [(host, port) for host in advertised_hosts(listen, own)]
    return messages.Join(
        name=name,
        region=region,
        listen=advertise[0] if advertise else ("", port),
        ways=addresses[: limits.MAX_WAYS],
        families=sorted({family for host in own if (family := family_of(host)) is not None}),
        held=staged,
        engine=engine,
    )


class Reporter:
    """``status`` makes the part of a report that states the present; ``extra`` are lists that are sent while they are
    not empty, by their key in REPORT.
    """

    def __init__(
        self,
        node: Node,
        transfers: Transfers,
        hub: HubSession,
        status: Callable[[tuple[int, int] | None], messages.Report],
        extra: Mapping[str, Callable[[], object]],
    ) -> None:
        self._node = node
        self._transfers = transfers
        self._hub = hub
        self._status = status
        self._extra = extra
        self._reported: set[bytes] = set()
        """Artifacts that the hub knows to be held here, since it was joined at ``_reported_since``."""
        self._reported_since: float | None = None

    def report(self) -> messages.Report:
        return dataclasses.replace(self._status(self._transfers.take_last()), **self._changes())

    def _evidence(self) -> dict[str, Any]:
        """Signed records of the newest versions here. A hub that lost a part of its state needs them before it goes
        on.
        """
        newest = sorted(self._node.holdings.values(), key=lambda h: h.open.version, reverse=True)
        durable = (h.assembly.durable_signed for h in newest)
        return {
            "durable": [signed for signed in durable if signed is not None][: limits.MAX_EVIDENCE],
            "opened": [h.assembly.open_signed for h in newest[: limits.MAX_EVIDENCE]],
        }

    def _changes(self) -> dict[str, Any]:
        """Artifacts that are held since the last report, and those that are held no longer. The first report on a
        connection lists all.
        """
        first = self._reported_since != self._hub.joined_at
        if first:
            self._reported_since, self._reported = self._hub.joined_at, set()
        held = {h.id for h in self._node.holdings.values() if h.complete}
        news: dict[str, Any] = {
            "held": sorted(held - self._reported)[: limits.MAX_HELD],
            "dropped": sorted(self._reported - held)[: limits.MAX_HELD],
            "garbled": self._node.garbled.most_common(limits.MAX_GARBLED),
            **{key: rows() for key, rows in self._extra.items()},
            **(self._evidence() if first else {}),
        }
        self._reported = (self._reported | set(news["held"])) - set(news["dropped"])
        return {key: value for key, value in news.items() if value}

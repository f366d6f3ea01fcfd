"""A peer's messages to the hub: JOIN with its identity and addresses, and REPORT with its progress, its last transfer
and changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2pcast.ground import limits
from p2pcast.ground.addresses import family_of, may_be_advertised
from p2pcast.ground.version import Version
from p2pcast.relay.holding import ArtifactHolder
from p2pcast.sockets.listen_sockets import advertised_hosts, own_hosts
from p2pcast.wire import messages

MEASURABLE_BYTES = limits.MIB
"""A smaller transfer is over before its rate can be measured."""


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
    """Build JOIN. ``port``: where this peer listens; ``own_host``: the address from which it reached the hub;
    ``engine``: name and role, for a host of an engine on several hosts.
    """
    own = [host for host in dict.fromkeys([own_host, *own_hosts()]) if may_be_advertised(host)]
    addresses = advertise or [(host, port) for host in advertised_hosts(listen, own)]
    return messages.Join(
        name=name,
        region=region,
        listen=advertise[0] if advertise else ("", port),
        ways=addresses[: limits.MAX_NODE_ADDRESSES],
        families=sorted({family for host in own if (family := family_of(host)) is not None}),
        held=staged,
        engine=engine,
    )


class ReportedNode(ArtifactHolder, Protocol):
    @property
    def garbled(self) -> Counter[bytes]:
        """Node id -> number of pieces from that node whose hash did not match."""


class ReportConnection(Protocol):
    """The connection to the hub."""

    @property
    def joined_at(self) -> float:
        """When this peer joined the hub to which it is connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedChanges:
    """The part of a report that lists changes and faults. None leaves a list out of the report."""

    held: Sequence[bytes] | None = None
    dropped: Sequence[bytes] | None = None
    garbled: Sequence[tuple[bytes, int]] | None = None
    evicted: Sequence[bytes] | None = None
    lacking: Sequence[messages.Missing] | None = None
    spoilt: Sequence[str] | None = None
    durable: Sequence[bytes] | None = None
    opened: Sequence[bytes] | None = None


class ReceivedArtifacts:
    """Measurements of received artifacts: the last one, for the hub, and the fastest."""

    def __init__(self) -> None:
        self.fastest_bps = 0.0
        """Rate of the fastest transfer above ``MEASURABLE_BYTES``, in bits per second; 0 if there was none yet."""
        self._last: tuple[int, int] | None = None

    def received(self, size: int, took_s: float) -> None:
        """Record that ``size`` bytes of an artifact were received in ``took_s`` seconds."""
        self._last = (size, int(took_s * 1e6))
        if size > MEASURABLE_BYTES:
            self.fastest_bps = max(self.fastest_bps, 8 * size / took_s)

    def take_last(self) -> tuple[int, int] | None:
        """Return bytes and microseconds of the last transfer, or None if that was returned before."""
        last, self._last = self._last, None
        return last


class Reporter:
    """``status`` adds the current state to the last transfer and the changes. ``evicted``, ``lacking`` and ``spoilt``
    return lists that are sent unless they are empty.
    """

    def __init__(
        self,
        node: ReportedNode,
        transfers: ReceivedArtifacts,
        hub: ReportConnection,
        status: Callable[[tuple[int, int] | None, ReportedChanges], messages.Report],
        *,
        evicted: Callable[[], Sequence[bytes]],
        lacking: Callable[[], Sequence[messages.Missing]],
        spoilt: Callable[[], Sequence[str]],
    ) -> None:
        self._node = node
        self._transfers = transfers
        self._hub = hub
        self._status = status
        self._evicted = evicted
        self._lacking = lacking
        self._spoilt = spoilt
        self._reported: set[bytes] = set()
        """Artifacts reported to the hub as held here since it was joined at ``_reported_since``."""
        self._reported_since: float | None = None

    def report(self) -> messages.Report:
        return self._status(self._transfers.take_last(), self._changes())

    def _changes(self) -> ReportedChanges:
        """Artifacts that have become held since the last report, and those that no longer are. The first report on a
        connection lists everything, and includes signed records of the newest versions: a hub that lost part of its
        state needs these before it can continue.
        """
        first = self._reported_since != self._hub.joined_at
        if first:
            self._reported_since, self._reported = self._hub.joined_at, set()
        here = self._node.holdings.values()
        complete = {h.id for h in here if h.complete}
        held = sorted(complete - self._reported)[: limits.MAX_HELD]
        dropped = sorted(self._reported - complete)[: limits.MAX_HELD]
        self._reported = (self._reported | set(held)) - set(dropped)
        newest = sorted(here, key=lambda h: h.open.version, reverse=True) if first else []
        durable = [signed for h in newest if (signed := h.assembly.durable_signed) is not None]
        return ReportedChanges(
            held=held or None,
            dropped=dropped or None,
            garbled=self._node.garbled.most_common(limits.MAX_CORRUPT_SENDERS) or None,
            evicted=self._evicted() or None,
            lacking=self._lacking() or None,
            spoilt=self._spoilt() or None,
            durable=durable[: limits.MAX_EVIDENCE] or None,
            opened=[h.assembly.open_signed for h in newest[: limits.MAX_EVIDENCE]] or None,
        )

"""Networks and events read from a scenario's tables. Pure.

An *argument*, which experiments receive, holds the tables as JSON: ``{"network": {mtu, queue_ms, congestion, regions:
[…], hosts: […]}, "events": […], "parameters": {…}}``. ``network_of`` and ``events_of`` return typed values; they raise
UsageError that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from netem.emulation.description import HUB, MAX_QUEUE_S, Bursts, EmulatedLink, EmulatedNetwork, Host, Region
from netem.emulation.tables import Table
from p2pcast.ground.errors import UsageError

MAX_AT_S: Final = 3600.0
MAX_COUNT: Final = 200
DO: Final = ("cut", "heal", "degrade", "kill", "stop", "continue", "join")
TO_LINKS: Final = ("cut", "heal", "degrade")
"""Events that also apply to a region's trunk or the hub's link."""
RUNS, STANDS, GONE = "runs", "stands still", "does not run"
TO_PEERS: Final = {
    "kill": ((RUNS, STANDS), GONE),
    "stop": ((RUNS,), STANDS),
    "continue": ((STANDS,), RUNS),
    "join": ((GONE,), RUNS),
}
"""Event on a peer's processes → (allowed states before, state after)."""


@dataclass(frozen=True, slots=True)
class NetworkEvent:
    """``place``: a host, or a region for its trunk. ``at_s``: seconds after ``version`` (1 is the first counted
    version) was opened; None stands for before the first version.

    ``cut``: no packet passes. ``degrade``: ``link`` replaces the link. ``heal``: the original link returns. ``kill``
    (SIGKILL), ``stop`` and ``continue`` (SIGSTOP, SIGCONT): the host's processes. ``join``: a killed peer restarts, or
    an absent peer starts for the first time.
    """

    at_s: float
    do: str
    place: str
    version: int | None = None
    link: EmulatedLink | None = None


def network_of(argument: Mapping[str, Any]) -> EmulatedNetwork:
    if "network" not in argument:
        raise UsageError("hosts is missing: this experiment needs a network")
    table = Table(argument["network"], "network")
    regions: list[Region] = []
    for each in table.tables("regions"):
        regions.append(Region(_name(each), _link(each)))
        each.close()
    hosts: list[Host] = []
    for each in table.tables("hosts"):
        name, count, region = _name(each), each.optional("count", int), each.optional("region", str)
        if count is not None and not 1 <= count <= MAX_COUNT:
            raise UsageError(f"{each.called('count')} is {count}: it must be from 1 to {MAX_COUNT}")
        link = _link(each)
        each.close()
        hosts += [
            Host(one, link, region)
            for one in ([name] if count is None else [f"{name}{n}" for n in range(1, count + 1)])
        ]
    mtu = table.with_default("mtu", int, 1500)
    if not 576 <= mtu <= 9000:
        raise UsageError(f"network.mtu is {mtu}: it must be from 576 to 9000 bytes")
    queue_ms = table.with_default("queue_ms", float, 50.0)
    if not 0 < queue_ms <= MAX_QUEUE_S * 1e3:
        raise UsageError(f"network.queue_ms is {queue_ms:g}: it must be above 0, to {MAX_QUEUE_S * 1e3:g}")
    congestion = table.optional("congestion", str)
    table.close()
    return EmulatedNetwork(tuple(hosts), mtu, queue_ms / 1e3, congestion, tuple(regions))


def events_of(argument: Mapping[str, Any]) -> list[NetworkEvent]:
    """Events ordered by version and time. Late peers are in the parameter ``absent`` of experiments that have it."""
    network = network_of(argument)
    events = [_event(table, network) for table in Table({"events": argument.get("events", [])}).tables("events")]
    ordered = sorted(enumerate(events, 1), key=lambda each: (each[1].version or 0, each[1].at_s))
    absent = argument.get("parameters", {}).get("absent", ())
    states = {
        name: GONE for name in (absent if isinstance(absent, list | tuple) else [absent]) if isinstance(name, str)
    }
    for number, event in ordered:
        _check_event(states, event, f"events[{number}].do is {event.do!r}")
    return [event for _, event in ordered]


def _check_event(states: dict[str, str], event: NetworkEvent, called: str) -> None:
    """Check one event and update ``states``, which holds the peers that do not simply run."""
    if event.do not in TO_PEERS:
        return
    if event.place == HUB:
        raise UsageError(f"{called}: {HUB!r} is no peer; only its link can be affected, by {', '.join(TO_LINKS)}")
    found, (fit, after) = states.get(event.place, RUNS), TO_PEERS[event.do]
    if found not in fit:
        raise UsageError(f"{called}: the peer of {event.place} {found} at that time")
    states[event.place] = after


def _event(table: Table, network: EmulatedNetwork) -> NetworkEvent:
    do, at_s, version = (
        table.choice("do", DO, ""),
        table.with_default("at_s", float, 0.0),
        table.optional("version", int),
    )
    if not 0 <= at_s <= MAX_AT_S:
        raise UsageError(f"{table.called('at_s')} is {at_s:g}: it must be from 0 to {MAX_AT_S:g}")
    if version is not None and version < 1:
        raise UsageError(f"{table.called('version')} is {version}: the first is 1")
    host, region = table.optional("host", str), table.optional("region", str)
    if (host is None) == (region is None):
        raise UsageError(f"{table.called('host')} or {table.called('region')}, and not both, must name the target")
    if region is not None and do not in TO_LINKS:
        raise UsageError(
            f"{table.called('do')} is {do!r}: only the trunk of a region can be affected, by {', '.join(TO_LINKS)}"
        )
    known = [each.name for each in (network.hosts if host is not None else network.regions)]
    place = host or region or ""
    if place not in known:
        kind = "host" if host is not None else "region"
        raise UsageError(f"{table.called(kind)}: there is no {kind} {place!r}; known: {', '.join(known) or 'none'}")
    link = _link(table, network.link(place)) if do == "degrade" else None
    if do == "degrade" and link == network.link(place):
        raise UsageError(f"{table.called('do')} is 'degrade', but no property of the link changes")
    table.close()
    return NetworkEvent(at_s, do, place, version, link)


def _name(table: Table) -> str:
    name = table.text("name")
    if not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name) or len(name) > 32:
        raise UsageError(f"{table.called('name')} is {name!r}: a name is up to 32 letters, digits, '-' or '_'")
    return name


def _link(table: Table, before: EmulatedLink = EmulatedLink()) -> EmulatedLink:  # noqa: B008 - frozen
    """The link with the given properties; other properties are those of ``before``."""
    up, down, both = table.rate("up"), table.rate("down"), table.rate("rate")
    if both is not None and (up is not None or down is not None):
        raise UsageError(f"{table.called('rate')} sets both directions: use either 'rate', or 'up' and 'down'")
    link = replace(before, up_bps=up or both or before.up_bps, down_bps=down or both or before.down_bps)
    for key, field in (("delay_ms", "delay_s"), ("jitter_ms", "jitter_s"), ("queue_ms", "queue_s")):
        if (value := table.optional(key, float)) is not None:
            link = replace(link, **{field: value / 1e3})
    if "loss" in table:
        link = replace(link, loss=table.share("loss"))
    if "reorder" in table:
        link = replace(link, reorder=table.share("reorder"))
    if "bursts" in table:
        if not isinstance(link.loss, Bursts) and link.loss:
            raise UsageError(f"{table.called('bursts')} and {table.called('loss')} exclude each other")
        bursts = table.table("bursts")
        link = replace(link, loss=_bursts(bursts))
    try:
        link.check()
    except UsageError as error:
        raise UsageError(f"{table.called('')[:-1]}: {error}") from None
    return link


def _bursts(table: Table) -> Bursts:
    bad = table.share("bad") if "bad" in table else 1.0
    bursts = Bursts(table.share("enter"), table.share("leave"), bad, table.share("good"))
    table.close()
    return bursts

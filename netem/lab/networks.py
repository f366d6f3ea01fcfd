"""Networks and events out of a scenario's tables, as they stand in its file. Pure.

An *argument*, which experiments are given, holds them as JSON: ``{"network": {mtu, queue_ms, congestion, regions: […], hosts: […]}, "events": […], "parameters":
{…}}``. ``network_of`` and ``events_of`` make typed values of it; raise UsageError that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from netem.broadcast.rivals import HUB
from netem.description import MAX_QUEUE_S, Bursts, Host, Link, Network, Region
from netem.lab.tables import Table
from p2pcast.errors import UsageError

MAX_AT_S: Final = 3600.0
MAX_COUNT: Final = 200
DO: Final = ("cut", "heal", "degrade", "kill", "stop", "continue", "join")
TO_LINKS: Final = ("cut", "heal", "degrade")
"""What a region's trunk can suffer too, and the hub's link."""
RUNS, STANDS, GONE = "runs", "stands still", "does not run"
TO_PEERS: Final = {
    "kill": ((RUNS, STANDS), GONE),
    "stop": ((RUNS,), STANDS),
    "continue": ((STANDS,), RUNS),
    "join": ((GONE,), RUNS),
}
"""What befalls a peer's processes → how it may find them, and how it leaves them."""


@dataclass(frozen=True, slots=True)
class Event:
    """``place``: a host, or a region, whose trunk is meant. ``at_s`` after ``version`` (1 is the first that counts) was opened; before the first where that is None.

    ``cut``: nothing comes through; ``degrade``: ``link`` is the new one; ``heal``: as it was at first; ``kill`` (SIGKILL), ``stop`` and ``continue`` (SIGSTOP,
    SIGCONT): the host's processes; ``join``: a peer that was killed is started again, or one that was to come later for the first time.
    """

    at_s: float
    do: str
    place: str
    version: int | None = None
    link: Link | None = None


def network_of(argument: Mapping[str, Any]) -> Network:
    if "network" not in argument:
        raise UsageError("hosts is missing: this experiment has a network")
    table = Table(argument["network"], "network")
    regions: list[Region] = []
    for each in table.tables("regions"):
        regions.append(Region(_name(each), _link(each)))
        each.close()
    hosts: list[Host] = []
    for each in table.tables("hosts"):
        name, count, region = _name(each), each.may("count", int), each.may("region", str)
        if count is not None and not 1 <= count <= MAX_COUNT:
            raise UsageError(f"{each.called('count')} is {count}: it must be from 1 to {MAX_COUNT}")
        link = _link(each)
        each.close()
        hosts += [Host(one, link, region) for one in ([name] if count is None else [f"{name}{n}" for n in range(1, count + 1)])]
    mtu = table.either("mtu", int, 1500)
    if not 576 <= mtu <= 9000:
        raise UsageError(f"network.mtu is {mtu}: it must be from 576 to 9000 bytes")
    queue_ms = table.either("queue_ms", float, 50.0)
    if not 0 < queue_ms <= MAX_QUEUE_S * 1e3:
        raise UsageError(f"network.queue_ms is {queue_ms:g}: it must be above 0, to {MAX_QUEUE_S * 1e3:g}")
    congestion = table.may("congestion", str)
    table.close()
    return Network(tuple(hosts), mtu, queue_ms / 1e3, congestion, tuple(regions))


def events_of(argument: Mapping[str, Any]) -> list[Event]:
    """In the order of their versions and times. A peer that comes later is among the parameters' ``absent``, where an experiment knows these."""
    network = network_of(argument)
    events = [_event(table, network) for table in Table({"events": argument.get("events", [])}).tables("events")]
    ordered = sorted(enumerate(events, 1), key=lambda each: (each[1].version or 0, each[1].at_s))
    absent = argument.get("parameters", {}).get("absent", ())
    states = {name: GONE for name in (absent if isinstance(absent, list | tuple) else [absent]) if isinstance(name, str)}
    for number, event in ordered:
        _befall(states, event, f"events[{number}].do is {event.do!r}")
    return [event for _, event in ordered]


def _befall(states: dict[str, str], event: Event, called: str) -> None:
    """``states``: of peers, where they do not just run."""
    if event.do not in TO_PEERS:
        return
    if event.place == HUB:
        raise UsageError(f"{called}: {HUB!r} is no peer; its link can be meant, by {', '.join(TO_LINKS)}")
    found, (fit, after) = states.get(event.place, RUNS), TO_PEERS[event.do]
    if found not in fit:
        raise UsageError(f"{called}: the peer of {event.place} {found} by then")
    states[event.place] = after


def _event(table: Table, network: Network) -> Event:
    do, at_s, version = table.choice("do", DO, ""), table.either("at_s", float, 0.0), table.may("version", int)
    if not 0 <= at_s <= MAX_AT_S:
        raise UsageError(f"{table.called('at_s')} is {at_s:g}: it must be from 0 to {MAX_AT_S:g}")
    if version is not None and version < 1:
        raise UsageError(f"{table.called('version')} is {version}: the first is 1")
    host, region = table.may("host", str), table.may("region", str)
    if (host is None) == (region is None):
        raise UsageError(f"{table.called('host')} or {table.called('region')}, and not both, must say whom it befalls")
    if region is not None and do not in TO_LINKS:
        raise UsageError(f"{table.called('do')} is {do!r}: of a region only its trunk can be meant, by {', '.join(TO_LINKS)}")
    known = [each.name for each in (network.hosts if host is not None else network.regions)]
    place = host or region or ""
    if place not in known:
        kind = "host" if host is not None else "region"
        raise UsageError(f"{table.called(kind)}: there is no {kind} {place!r}, but {', '.join(known) or 'none'}")
    link = _link(table, network.link(place)) if do == "degrade" else None
    if do == "degrade" and link == network.link(place):
        raise UsageError(f"{table.called('do')} is 'degrade', but nothing of the link is said to change")
    table.close()
    return Event(at_s, do, place, version, link)


def _name(table: Table) -> str:
    name = table.text("name")
    if not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name) or len(name) > 32:
        raise UsageError(f"{table.called('name')} is {name!r}: a name is up to 32 letters, digits, '-' or '_'")
    return name


def _link(table: Table, before: Link = Link()) -> Link:  # noqa: B008 - frozen
    """What is said of a link; the rest is as before."""
    up, down, both = table.rate("up"), table.rate("down"), table.rate("rate")
    if both is not None and (up is not None or down is not None):
        raise UsageError(f"{table.called('rate')} is up and down at once: either it or those")
    link = replace(before, up_bps=up or both or before.up_bps, down_bps=down or both or before.down_bps)
    for key, field in (("delay_ms", "delay_s"), ("jitter_ms", "jitter_s"), ("queue_ms", "queue_s")):
        if (value := table.may(key, float)) is not None:
            link = replace(link, **{field: value / 1e3})
    if "loss" in table:
        link = replace(link, loss=table.share("loss"))
    if "reorder" in table:
        link = replace(link, reorder=table.share("reorder"))
    if "bursts" in table:
        if not isinstance(link.loss, Bursts) and link.loss:
            raise UsageError(f"{table.called('bursts')} and {table.called('loss')}: a link loses packets one way or the other")
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

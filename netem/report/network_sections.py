"""Report sections about links: broadcasts beside rivals, stripes over long paths, small versions, faults during a
broadcast. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from netem.bench.figures_text import Column, Columns, Row
from netem.lab.scenario import Requirement
from netem.latency import FOLDER, PUBLISHER
from netem.report import section_text as text
from netem.report.section_text import (
    Picture,
    RivalComparison,
    Section,
    cell,
    data_of,
    figure,
    judged,
    pivot,
    share,
    table,
)
from p2pcast.ground.limits import MIB

Document = Mapping[str, Any]
P2PCAST: Final = "p2pcast"
STATE: Final = "p2pcast, whole state"
NO_DELTAS: Final = ("rsync", "zstd of the file")
IDEAL_BARS: Final = {8: 1.10, 16: 1.12}
"""Bound on the time to the last peer ÷ ideal, by number of peers."""
STRIPES_WAY: Final = (0.15, 0.005)
"""Round trip in s, and loss, of the path to which the bar beside one CUBIC stream applies."""
CROWDED: Final = 0.95
BEYOND_S: Final = {PUBLISHER: 0.06, FOLDER: 0.12}
"""Bound on a small version's time beyond transfer and way, by source."""
PLACES: Final = ("hub", "head", "middle", "tail")
SMALL_BYTES, NEAR_S = 50_000, 0.001
"""The versions and the round trips to which BEYOND_S applies."""
FIGURES: Final = ("moved_bytes", "peer_sent_bytes", "changed_share")
"""Keys of a row's settings that are figures."""


def broadcast(document: Document) -> Section:
    rows = [{**row["settings"], **row} for row in document["rows"] if "skipped" not in row]
    given = [row for row in rows if row["system"] not in (*NO_DELTAS, STATE)]
    whole = [row for row in rows if row["system"] in (*NO_DELTAS, STATE)]
    payload = next((row["payload_bytes"] for row in given if row["system"] != P2PCAST), None)
    blocks = [
        f"A broadcast from a hub of {figure(document['uplink_bps'] / 1e6)} Mbit/s to hosts of "
        f"{figure(document['peer_bps'] / 1e6)} Mbit/s, each a network namespace with its own processes "
        f"({document['congestion']}, medians of {document['rounds']}). Headers alone exceed the ideal by 4.6 %. "
        "p2pcast signs, checks, stores and, unless a row says plaintext, encrypts; the bare chain of sockets does not.",
    ]
    if given:
        mib = f"{payload / MIB:.3g} MiB" if payload else "a version"
        blocks += [f"{mib} of incompressible bytes, time to the last peer ÷ ideal:", _by_peers(given, "all_over_ideal")]
    if whole:
        changed = next((row["changed_share"] for row in whole if "changed_share" in row), None)
        blocks += [
            f"Seconds until the last peer has a state of {whole[0]['payload_bytes'] / MIB:.3g} MiB of which "
            f"{share(changed)} has changed, with the making of p2pcast's delta. The rivals have no deltas:",
            _by_peers(whole, "all_s"),
        ]
    blocks += [
        f"{r['system']}, {r['peers']} peers: left out, {r['skipped']}." for r in document["rows"] if "skipped" in r
    ]
    if crowded := [r for r in rows if r["machine_busy"] > CROWDED]:
        names = ", ".join(f"{r['system']} (N = {r['peers']})" for r in crowded)
        blocks.append(f"More than {CROWDED:.0%} of the cores were in use, which limits these times in part: {names}.")
    bars = [row | {"bar": IDEAL_BARS[row["peers"]]} for row in given if row["peers"] in IDEAL_BARS]
    ours = tuple(row["system"] for row in given if row["system"].startswith(P2PCAST))
    hold = Requirement("time to the last peer ÷ ideal", "all_over_ideal", {"system": ours}, below="bar")
    compared = [
        *_races(given, P2PCAST, "time to the last peer ÷ ideal", "all_over_ideal"),
        *_races(whole, STATE, "time to the last peer, a changed state, s", "all_s"),
        *judged("broadcast", bars, hold, case="{system}, N = {peers}"),
    ]
    columns: Columns = [
        *((key, key) for key in ("system", "peers", "all_s", "all_over_ideal", "cpu_s", "machine_busy")),
        ("each_over_ideal", lambda row: " ".join(f"{x:.2f}" for x in row["every_over_ideal"])),
        ("received_bytes", lambda row: row.get("moved_bytes")), ("sent_bytes", lambda row: row.get("peer_sent_bytes")),
        ("settings", lambda row: ", ".join(f"{k} {cell(v)}" for k, v in row["settings"].items() if k not in FIGURES)),
    ]  # fmt: skip
    best = _best(given, P2PCAST, "time to the last of {peers} peers ÷ ideal", "all_over_ideal")
    best += _best(whole, STATE, "time until {peers} peers have a state with 1 % changed, s", "all_s")
    data = {"broadcast": data_of(rows, columns)}
    return Section("Broadcast", blocks, compared, _pictures(given, whole), data, best)


def _by_peers(rows: Sequence[Row], key: str) -> str:
    return pivot(["system"], (([row["system"]], f"N = {row['peers']}", row[key]) for row in rows))


def _races(rows: Sequence[Row], ours: str, what: str, key: str) -> list[RivalComparison]:
    """The row of ``ours`` beside each other system's row with as many peers."""
    others = tuple(dict.fromkeys(r["system"] for r in rows if not r["system"].startswith(P2PCAST)))
    hold = Requirement(what, key, {"system": (ours,)}, {"system": others}, ("peers",), below=1.0)
    return list(judged("broadcast", rows, hold, "{system}", case="N = {peers}"))


def _best(rows: Sequence[Row], ours: str, what: str, key: str) -> list[list[object]]:
    """The figure at the most peers beside those of other systems; the bare chain is none."""
    most = max((row["peers"] for row in rows if row["system"] == ours), default=None)
    found = {row["system"]: row[key] for row in rows if row["peers"] == most}
    others = (f"{n} {cell(value)}" for n, value in found.items() if not n.startswith(P2PCAST) and n != "bare chain")
    return [] if most is None else [[what.format(peers=most), found[ours], ", ".join(others)]]


def _pictures(given: Sequence[Document], whole: Sequence[Document]) -> list[Picture]:
    def series(rows: Sequence[Document], key: str) -> dict[str, dict[Any, float]]:
        names = dict.fromkeys(row["system"] for row in rows)
        return {n: {f"{row['peers']} peers": row[key] for row in rows if row["system"] == n} for n in names}

    ideal, changed = (
        "time to the last peer ÷ payload at a peer's rate",
        "a state with 1 % changed: time to the last peer",
    )
    pictures = [
        Picture("broadcast", ideal, "", "÷ ideal", series(given, "all_over_ideal"), bars=True, bound=("ideal", 1.0)),
        Picture("broadcast-state", changed, "", "s", series(whole, "all_s"), bars=True, log="y"),
    ]
    return [picture for picture in pictures if picture.series]


def stripes(document: Document) -> Section:
    ways = [way | {"name": f"{way['rtt_s'] * 1e3:.0f} ms, {way['loss']:.1%}"} for way in document["ways"]]
    measured = [way for way in ways if "choice" in way]
    numbers = sorted({row["stripes"] for row in document["rows"] if not row.get("chosen")})
    names = list(dict.fromkeys(row["congestion"] for row in document["rows"]))

    def goodput(name: str, n: int) -> tuple[str, Column]:
        return f"{name}: {n}", lambda way: way["by_congestion"].get(name, {}).get("of_ceiling", {}).get(str(n))

    columns: Columns = [
        ("round trip", "{rtt_s:ms .0f} ms"), ("loss", "{loss:.1%}"), goodput(names[0], numbers[0]),
        ("chosen", "{choice[congestion]}: {choice[stripes]}"), ("÷ best tried", lambda way: way["choice"]["to_best"]),
        ("÷ one CUBIC", lambda way: way["choice"]["to_single_cubic"]),
    ]  # fmt: skip
    every = [*columns[:2], *(goodput(name, number) for name in names for number in numbers), *columns[3:]]
    blocks = [
        f"Goodput of one link over emulated paths ({document['backend']}) of {figure(document['rate_bps'] / 1e6)} "
        f"Mbit/s, versions of {document['payload_bytes'] / MIB:.3g} MiB, as shares of the path's capacity after "
        "headers. *Chosen* is p2pcast's own choice, measured on a link of its own.",
        text.table_of(measured, columns),
        *(f"{way['name']}: left out, {'; '.join(way['off'])}." for way in ways if way.get("off")),
    ]
    compared: list[RivalComparison] = []
    series = {}
    best = Requirement("chosen stripes ÷ the best tried", "to_best", above=0.9)
    cubic = Requirement("chosen stripes ÷ one CUBIC stream", "to_single_cubic", above=1.6)
    for way in measured:
        choice = way["choice"] | {"name": way["name"]}
        for hold in (best, cubic) if (way["rtt_s"], way["loss"]) == STRIPES_WAY else (best,):
            compared += judged("stripes", [choice], hold, case="{name}")
        for congestion, found in way["by_congestion"].items():
            series[f"{congestion}, {way['name']}"] = {int(n): value for n, value in found["of_ceiling"].items()}
    picture = Picture("stripes", "goodput by number of stripes", "stripes", "share of the path", series, log="x")
    data = {"stripes": data_of(measured, every)}
    return Section("One link over a long path", blocks, compared, [picture] if series else [], data)


def latency(document: Document) -> Section:
    stages = {
        "begun": "opened_s", "first message": "receiving_s", "received": "received_s", "staged": "staged_s",
        "first peer live": "first_live_s", "last peer live": "live_s", "beyond": "beyond_s",
    }  # fmt: skip
    rows = [
        row | {"rtt_ms": 1e3 * row["rtt_s"], "kb": row["bytes"] / 1e3, "bar": BEYOND_S[row["source"]]}
        for row in document["rows"]
    ]
    blocks = [
        f"Milliseconds from `publish()`, or from a folder's rename, until the last of {document['peers']} peers at "
        f"{figure(document['rate_bps'] / 1e6)} Mbit/s has a version of a state of "
        f"{figure(document['state_bytes'] / 1e6)} MB; medians of {document['rounds']} versions. *Beyond*: the last "
        "live peer, less transfer and half round trips.",
        table(
            ["source", "round trip, ms", "delta, kB", *stages],
            ([r["source"], r["rtt_ms"], r["kb"], *(round(1e3 * r[key]) for key in stages.values())] for r in rows),
        ),
    ]  # fmt: skip
    hold = Requirement("ms beyond transfer and path", "beyond_s", below="bar")
    near = [row for row in rows if row["bytes"] < SMALL_BYTES and row["rtt_s"] <= NEAR_S]
    compared = list(judged("latency", near, hold, case="{source}, {kb:.0f} kB", times=1e3))
    return Section("Small versions", blocks, compared)


def faults(document: Document) -> Section:
    rows = [row | {"gap": max(0.0, float(row["gap_s"]) - float(row["outage_s"]))} for row in document["rows"]]
    failed = document.get("failed", [])
    # The worst case is the last one, which a pivot keeps.
    cells = [
        ([row["fault"]], f"{what}: {row['position']}", f"{row[key]:.2f}")
        for key, what in (("gap", "gap"), ("all_s", "all"))
        for row in sorted(rows, key=lambda row: (PLACES.index(row["position"]), row[key]))
    ]
    blocks = [
        f"A fault at each place of two chains of five peers, at the start, the middle and the end of versions of "
        f"{document['payload_bytes'] / MIB:.3g} MiB at {figure(document['rate_bits_s'] / 1e6)} Mbit/s. Worst cases, in "
        f"seconds. *Gap*: the longest time in which an incomplete survivor received nothing, without the hub's "
        f"absence. *All*: until all peers have the version; undisturbed {document['undisturbed_s']:.2f}. "
        f"Bytes sent twice: {document['bytes_duplicate']}; cases with wrong bits: {document['wrong']}; cases that "
        f"never recovered: {', '.join(failed) or 0}.",
        pivot(["fault"], cells),
    ]
    killed = {"fault": ("kill", "several")}
    case = "{fault} {position} {moment}"
    compared = [
        *judged("faults", [document], Requirement("bytes sent twice", "bytes_duplicate", below=0)),
        *judged("faults", [document], Requirement("cases with wrong bits", "wrong", below=0)),
        *judged("faults", [{"failed": len(failed)}], Requirement("cases that never recovered", "failed", below=0)),
        *judged("faults", rows, Requirement("gap in s", "gap", killed, below=1.0), case=case),
        *judged("faults", rows, Requirement("s until all peers have it", "all_s", below="most_s"), case=case),
    ]
    keys = ("fault", "position", "moment", "gap", "outage_s", "all_s", "most_s")
    return Section("Faults", blocks, compared, data={"faults": data_of(rows, [(key, key) for key in keys])})

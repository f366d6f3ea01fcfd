"""Report sections about links: broadcasts beside rivals, stripes over long paths, small versions, faults during a
broadcast. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from netem.bench.figures_text import Column, Columns, Row
from netem.lab.scenario import Requirement
from netem.latency import FOLDER, PUBLISHER
from netem.report.section_text import Picture, RivalComparison, Section, cell, figure, judged, share, table, table_of
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
SMALL_BYTES, NEAR_S = 50_000, 0.001
"""The versions and the round trips to which BEYOND_S applies."""
NOT_SETTINGS: Final = ("moved_bytes", "peer_sent_bytes", "changed_share")


def broadcast(document: Document) -> Section:
    rows = [row for row in document["rows"] if "skipped" not in row]
    given = [row for row in rows if row["system"] not in (*NO_DELTAS, STATE)]
    whole = [row for row in rows if row["system"] in (*NO_DELTAS, STATE)]
    payload = next((row["payload_bytes"] for row in given if row["system"] != P2PCAST), None)
    last: Columns = (
        ("system", "system"), ("peers", "peers"), ("time to the last, s", "{all_s:.3f}"),
    )  # fmt: skip
    blocks = [
        f"From a hub of {figure(document['uplink_bps'] / 1e6)} Mbit/s to hosts of "
        f"{figure(document['peer_bps'] / 1e6)} Mbit/s. Each host is a network namespace with its own processes. "
        f"Congestion control {document['congestion']}, {document['cores']} cores, medians of {document['rounds']} "
        "broadcasts. *Ideal* is the payload at a peer's own rate; headers alone exceed it by 4.6 %. p2pcast uses TLS "
        "unless a row says plaintext, and signs, checks and stores. The bare chain of sockets does none of that; it "
        "shows the limits of links and kernel.",
    ]  # fmt: skip
    if given:
        mib = f"{payload / MIB:.3g} MiB" if payload else "a version"
        columns = (
            *last, ("÷ ideal", "{all_over_ideal:.3f}"),
            ("of each broadcast", lambda row: " ".join(f"{x:.2f}" for x in row["every_over_ideal"])),
            ("CPU s, all", "cpu_s"), ("cores in use", "{machine_busy:.0%}"),
        )  # fmt: skip
        blocks += [f"The same {mib} of incompressible bytes to all peers:", table_of(given, columns)]
    if whole:
        changed = next((r["settings"]["changed_share"] for r in whole if "changed_share" in r["settings"]), None)
        columns = (
            *last, ("MB to a peer", lambda row: _megabytes(row, "moved_bytes")),
            ("MB from a peer", lambda row: _megabytes(row, "peer_sent_bytes")), ("CPU s, all", "cpu_s"),
        )  # fmt: skip
        blocks += [
            f"A state of {whole[0]['payload_bytes'] / MIB:.3g} MiB of which {share(changed)} has changed at random "
            "places, until all peers have the new state. The rivals here have no deltas. p2pcast gets the same "
            "states, and finds, codes and signs the delta within that time. Bytes are those received and sent over "
            "one peer's link, headers included:",
            table_of(whole, columns),
        ]
    blocks += [
        f"{r['system']}, {r['peers']} peers: left out, {r['skipped']}." for r in document["rows"] if "skipped" in r
    ]
    if crowded := [r for r in rows if r["machine_busy"] > CROWDED]:
        names = ", ".join(f"{r['system']} (N = {r['peers']})" for r in crowded)
        blocks.append(
            f"More than {CROWDED:.0%} of the cores were in use, so the processors limit these times in part: {names}."
        )
    blocks.append(_settings(rows))
    bars = [row | {"bar": IDEAL_BARS[row["peers"]]} for row in given if row["peers"] in IDEAL_BARS]
    ours = tuple(row["system"] for row in given if row["system"].startswith(P2PCAST))
    compared = [
        *_races(given, P2PCAST, "time to the last ÷ ideal, N = {peers}", "all_over_ideal"),
        *_races(whole, STATE, "a state, time to the last in s, N = {peers}", "all_s"),
        *judged(
            "broadcast",
            bars,
            Requirement(
                "{system}, time to the last ÷ ideal, N = {peers}", "all_over_ideal", {"system": ours}, below="bar"
            ),
        ),
    ]
    return Section("Broadcast", blocks, compared, _pictures(given, whole))


def _races(rows: Sequence[Row], ours: str, what: str, key: str) -> list[RivalComparison]:
    """The row of ``ours`` beside each other system's row with as many peers."""
    others = tuple(dict.fromkeys(r["system"] for r in rows if not r["system"].startswith(P2PCAST)))
    hold = Requirement(what, key, {"system": (ours,)}, {"system": others}, ("peers",), below=1.0)
    return list(judged("broadcast", rows, hold, "{system}"))


def _megabytes(row: Row, key: str) -> str | None:
    return None if key not in row["settings"] else f"{row['settings'][key] / 1e6:.2f}"


def _settings(rows: Sequence[Document]) -> str:
    """The settings of each system, once, for repeating the run."""
    found: dict[str, str] = {}
    for row in rows:
        plain = {key: value for key, value in row["settings"].items() if key not in NOT_SETTINGS}
        if plain:
            found.setdefault(row["system"], ", ".join(f"{key} {cell(value)}" for key, value in plain.items()))
    lines = [f"- {system}: {settings}" for system, settings in found.items()]
    return "\n".join(["<details><summary>Settings</summary>", "", *lines, "", "</details>"])


def _pictures(given: Sequence[Document], whole: Sequence[Document]) -> list[Picture]:
    def series(rows: Sequence[Document], key: str) -> dict[str, dict[Any, float]]:
        found: dict[str, dict[Any, float]] = {}
        for row in rows:
            found.setdefault(row["system"], {})[f"{row['peers']} peers"] = row[key]
        return found

    ideal, state = series(given, "all_over_ideal"), series(whole, "all_s")
    title, changed = (
        "time to the last peer ÷ payload at a peer's rate",
        "a state with 1 % changed: time to the last peer",
    )
    pictures = [
        Picture("broadcast", title, "", "÷ ideal", ideal, bars=True, bound=("ideal", 1.0)),
        Picture("broadcast-state", changed, "", "s", state, bars=True, log="y"),
    ]
    return [picture for picture in pictures if picture.series]


def stripes(document: Document) -> Section:
    ways = [way | {"name": f"{way['rtt_s'] * 1e3:.0f} ms, {way['loss']:.1%}"} for way in document["ways"]]
    measured = [way for way in ways if "choice" in way]
    numbers = sorted({row["stripes"] for row in document["rows"] if not row.get("chosen")})
    names = list(dict.fromkeys(row["congestion"] for row in document["rows"]))

    def goodput(name: str, number: int) -> tuple[str, Column]:
        return (
            f"{name}: {number}",
            lambda way: way["by_congestion"].get(name, {}).get("of_ceiling", {}).get(str(number)),
        )

    columns: Columns = [
        ("round trip", "{rtt_s:ms .0f} ms"), ("loss", "{loss:.1%}"),
        *(goodput(name, number) for name in names for number in numbers),
        ("chosen", "{choice[congestion]}: {choice[stripes]}"), ("÷ best", lambda way: way["choice"]["to_best"]),
        ("÷ one CUBIC", lambda way: way["choice"]["to_single_cubic"]),
    ]  # fmt: skip
    blocks = [
        f"One p2pcast link over real netem ({document['backend']}), {figure(document['rate_bps'] / 1e6)} Mbit/s, "
        f"versions of {document['payload_bytes'] / MIB:.3g} MiB. Goodput ÷ path capacity after headers; p2pcast's own "
        "choice has a link of its own. Each path was measured first; a path that deviates by more than 5 % has no "
        "figures.",
        table_of(measured, columns),
        *(f"{way['name']}: left out, {'; '.join(way['off'])}." for way in ways if way.get("off")),
    ]
    compared: list[RivalComparison] = []
    series = {}
    best = Requirement("p2pcast's choice ÷ the best tried, {name}", "to_best", above=0.9)
    cubic = Requirement("p2pcast's choice ÷ one CUBIC, {name}", "to_single_cubic", above=1.6)
    for way in measured:
        choice = way["choice"] | {"name": way["name"]}
        for hold in (best, cubic) if (way["rtt_s"], way["loss"]) == STRIPES_WAY else (best,):
            compared += judged("stripes", [choice], hold)
        for congestion, found in way["by_congestion"].items():
            series[f"{congestion}, {way['name']}"] = {int(n): value for n, value in found["of_ceiling"].items()}
    picture = Picture("stripes", "goodput by number of stripes", "stripes", "share of the way", series, log="x")
    return Section("One link over a long path", blocks, compared, [picture] if series else [])


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
        f"A hub and {document['peers']} peers at {figure(document['rate_bps'] / 1e6)} Mbit/s, a state of "
        f"{figure(document['state_bytes'] / 1e6)} MB. Milliseconds from `publish()`, or from a folder's rename, until "
        f"the last peer has reached each stage; medians of {document['rounds']} versions. *Beyond*: the last live "
        "peer, less transfer and half round trips.",
        table(
            ["source", "round trip, ms", "delta, kB", *stages],
            ([r["source"], r["rtt_ms"], r["kb"], *(round(1e3 * r[key]) for key in stages.values())] for r in rows),
        ),
    ]  # fmt: skip
    hold = Requirement("beyond transfer and way in ms, {source}, {kb:.0f} kB", "beyond_s", below="bar")
    near = [row for row in rows if row["bytes"] < SMALL_BYTES and row["rtt_s"] <= NEAR_S]
    return Section("Small versions", blocks, list(judged("latency", near, hold, times=1e3)))


def faults(document: Document) -> Section:
    rows = [row | {"gap": max(0.0, float(row["gap_s"]) - float(row["outage_s"]))} for row in document["rows"]]
    groups: dict[tuple[str, str], list[Document]] = {}
    for row in rows:
        groups.setdefault((row["fault"], row["position"]), []).append(row)
    failed = document.get("failed", [])
    blocks = [
        f"A hub and five peers in two chains, versions of {document['payload_bytes'] / MIB:.3g} MiB at "
        f"{figure(document['rate_bits_s'] / 1e6)} Mbit/s. Each fault is injected at each place, at the start, in the "
        f"middle and at the last pieces. Undisturbed {document['undisturbed_s']:.2f} s. *Gap*: the longest time in "
        "which an incomplete survivor received nothing, without the hub's absence. Bytes sent twice: "
        f"{document['bytes_duplicate']}; cases with other bits: {document['wrong']}; cases that never recovered: "
        f"{', '.join(failed) or 0}.",
        table(
            ["fault", "at", "gap, s: median", "worst", "all peers have it, s: median", "worst"],
            (
                [*group, *(f"{pick([r[key] for r in some]):.2f}" for key in ("gap", "all_s") for pick in (median, max))]
                for group, some in groups.items()
            ),
        ),
    ]  # fmt: skip
    killed = {"fault": ("kill", "several")}
    case = "{fault} {position} {moment}"
    compared = [
        *judged("faults", [document], Requirement("bytes sent twice", "bytes_duplicate", below=0)),
        *judged("faults", [document], Requirement("cases with other bits", "wrong", below=0)),
        *judged("faults", [{"failed": len(failed)}], Requirement("cases that never recovered", "failed", below=0)),
        *judged("faults", rows, Requirement(f"gap in s, {case}", "gap", killed, below=1.0)),
        *judged("faults", rows, Requirement(f"until all peers have it in s, {case}", "all_s", below="most_s")),
    ]
    return Section("Faults", blocks, compared)

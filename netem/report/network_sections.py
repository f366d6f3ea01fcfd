"""Report sections about links: broadcasts beside rivals, stripes over long paths, small versions, faults during a
broadcast. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from netem.latency import FOLDER, PUBLISHER
from netem.report.section_text import Comparison, Picture, Section, cell, figure, share, table
from p2pcast.ground.limits import MIB

Document = Mapping[str, Any]
P2PCAST: Final = "p2pcast"
STATE: Final = "p2pcast, whole state"
NO_DELTAS: Final = ("rsync", "zstd of the file")
IDEAL_BARS: Final = {8: 1.10, 16: 1.12}
"""Bound on the time to the last peer ÷ ideal, by number of peers."""
OF_THE_BEST, OF_ONE_CUBIC = 0.9, 1.6
STRIPES_WAY: Final = (0.15, 0.005)
"""Round trip in s, and loss, of the path to which OF_ONE_CUBIC applies."""
FLOW_S: Final = 1.0
CROWDED: Final = 0.95
BEYOND_S: Final = {PUBLISHER: 0.06, FOLDER: 0.12}
"""Bound on a small version's time beyond transfer and way, by source."""
SMALL_BYTES, NEAR_S = 50_000, 0.001
"""The versions and the round trips to which BEYOND_S applies."""


def broadcast(document: Document) -> Section:
    rows = [row for row in document["rows"] if "skipped" not in row]
    skipped = [row for row in document["rows"] if "skipped" in row]
    given = [row for row in rows if row["system"] not in (*NO_DELTAS, STATE)]
    whole = [row for row in rows if row["system"] in (*NO_DELTAS, STATE)]
    payload = next((row["payload_bytes"] for row in given if row["system"] != P2PCAST), None)
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
        blocks += [
            f"The same {mib} of incompressible bytes to all peers:",
            table(
                [
                    "system",
                    "peers",
                    "time to the last, s",
                    "÷ ideal",
                    "of each broadcast",
                    "CPU s, all",
                    "cores in use",
                ],
                (
                    [
                        r["system"],
                        r["peers"],
                        f"{r['all_s']:.3f}",
                        f"{r['all_over_ideal']:.3f}",
                        " ".join(f"{x:.2f}" for x in r["every_over_ideal"]),
                        r["cpu_s"],
                        f"{r['machine_busy']:.0%}",
                    ]
                    for r in given
                ),
            ),
        ]
    if whole:
        state = whole[0]["payload_bytes"]
        changed = next((r["settings"]["changed_share"] for r in whole if "changed_share" in r["settings"]), None)
        blocks += [
            f"A state of {state / MIB:.3g} MiB of which {share(changed)} has changed at random places, until all "
            "peers have the new state. The rivals here have no deltas. p2pcast gets the same states, and finds, codes "
            "and signs the delta within that time. Bytes are those received and sent over one peer's link, headers "
            "included:",
            table(
                ["system", "peers", "time to the last, s", "MB to a peer", "MB from a peer", "CPU s, all"],
                (
                    [
                        r["system"], r["peers"], f"{r['all_s']:.3f}", _megabytes(r, "moved_bytes"),
                        _megabytes(r, "peer_sent_bytes"), r["cpu_s"],
                    ]
                    for r in whole
                ),
            ),
        ]  # fmt: skip
    blocks += [f"{r['system']}, {r['peers']} peers: left out, {r['skipped']}." for r in skipped]
    if crowded := [r for r in rows if r["machine_busy"] > CROWDED]:
        names = ", ".join(f"{r['system']} (N = {r['peers']})" for r in crowded)
        blocks.append(
            f"More than {CROWDED:.0%} of the cores were in use, so the processors limit these times in part: {names}."
        )
    blocks.append(_settings(rows))
    return Section("Broadcast", blocks, [*_ahead(given), *_whole(whole), *_ideal(given)], _pictures(given, whole))


def _megabytes(row: Document, key: str) -> str | None:
    return None if key not in row["settings"] else f"{row['settings'][key] / 1e6:.2f}"


def _settings(rows: Sequence[Document]) -> str:
    """The settings of each system, once, for repeating the run."""
    found: dict[str, str] = {}
    for row in rows:
        plain = {
            k: v for k, v in row["settings"].items() if k not in ("moved_bytes", "peer_sent_bytes", "changed_share")
        }
        if plain:
            found.setdefault(row["system"], ", ".join(f"{key} {cell(value)}" for key, value in plain.items()))
    lines = [f"- {system}: {settings}" for system, settings in found.items()]
    return "\n".join(["<details><summary>Settings</summary>", "", *lines, "", "</details>"])


def _ahead(rows: Sequence[Document]) -> list[Comparison]:
    return [
        Comparison(
            "broadcast",
            f"time to the last ÷ ideal, N = {ours['peers']}",
            ours["all_over_ideal"],
            r["all_over_ideal"],
            r["system"],
        )
        for ours in rows
        if ours["system"] == P2PCAST
        for r in rows
        if r["peers"] == ours["peers"] and not r["system"].startswith(P2PCAST)
    ]


def _whole(rows: Sequence[Document]) -> list[Comparison]:
    return [
        Comparison(
            "broadcast", f"a state, time to the last in s, N = {ours['peers']}", ours["all_s"], r["all_s"], r["system"]
        )
        for ours in rows
        if ours["system"] == STATE
        for r in rows
        if r["peers"] == ours["peers"] and r["system"] != STATE
    ]


def _ideal(rows: Sequence[Document]) -> list[Comparison]:
    return [
        Comparison(
            "broadcast",
            f"{r['system']}, time to the last ÷ ideal, N = {r['peers']}",
            r["all_over_ideal"],
            IDEAL_BARS[r["peers"]],
        )
        for r in rows
        if r["system"].startswith(P2PCAST) and r["peers"] in IDEAL_BARS
    ]


def _pictures(given: Sequence[Document], whole: Sequence[Document]) -> list[Picture]:
    def series(rows: Sequence[Document], key: str) -> dict[str, dict[Any, float]]:
        found: dict[str, dict[Any, float]] = {}
        for row in rows:
            found.setdefault(row["system"], {})[f"{row['peers']} peers"] = row[key]
        return found

    made = []
    if given:
        made.append(
            Picture(
                "broadcast",
                "time to the last peer ÷ payload at a peer's rate",
                "",
                "÷ ideal",
                series(given, "all_over_ideal"),
                bars=True,
                bound=("ideal", 1.0),
            )
        )
    if whole:
        made.append(
            Picture(
                "broadcast-state",
                "a state with 1 % changed: time to the last peer",
                "",
                "s",
                series(whole, "all_s"),
                bars=True,
                log="y",
            )
        )
    return made


def stripes(document: Document) -> Section:
    measured = [way for way in document["ways"] if "choice" in way]
    numbers = sorted({row["stripes"] for row in document["rows"] if not row.get("chosen")})
    names = list(dict.fromkeys(row["congestion"] for row in document["rows"]))
    blocks = [
        f"One p2pcast link over real netem ({document['backend']}), {figure(document['rate_bps'] / 1e6)} Mbit/s, "
        f"versions of {document['payload_bytes'] / MIB:.3g} MiB. Goodput ÷ path capacity after headers; p2pcast's own "
        "choice has a link of its own. Each path was measured first; a path that deviates by more than 5 % has no "
        "figures.",
        table(
            [
                "round trip",
                "loss",
                *(f"{name}: {n}" for name in names for n in numbers),
                "chosen",
                "÷ best",
                "÷ one CUBIC",
            ],
            (
                [
                    f"{way['rtt_s'] * 1e3:.0f} ms",
                    f"{way['loss']:.1%}",
                    *(
                        way["by_congestion"].get(name, {}).get("of_ceiling", {}).get(str(n))
                        for name in names
                        for n in numbers
                    ),
                    f"{way['choice']['congestion']}: {way['choice']['stripes']}",
                    way["choice"]["to_best"],
                    way["choice"]["to_single_cubic"],
                ]
                for way in measured
            ),
        ),
        *(
            f"{way['rtt_s'] * 1e3:.0f} ms, {way['loss']:.1%}: left out, {'; '.join(way['off'])}."
            for way in document["ways"]
            if way.get("off")
        ),
    ]
    compared, series = [], {}
    for way in measured:
        name, choice = f"{way['rtt_s'] * 1e3:.0f} ms, {way['loss']:.1%}", way["choice"]
        if choice["to_best"] is not None:
            compared.append(
                Comparison(
                    "stripes", f"p2pcast's choice ÷ the best tried, {name}", choice["to_best"], OF_THE_BEST, less=False
                )
            )
        if (way["rtt_s"], way["loss"]) == STRIPES_WAY and choice["to_single_cubic"] is not None:
            compared.append(
                Comparison(
                    "stripes",
                    f"p2pcast's choice ÷ one CUBIC, {name}",
                    choice["to_single_cubic"],
                    OF_ONE_CUBIC,
                    less=False,
                )
            )
        for congestion, found in way["by_congestion"].items():
            series[f"{congestion}, {name}"] = {int(n): value for n, value in found["of_ceiling"].items()}
    pictures = (
        [Picture("stripes", "goodput by number of stripes", "stripes", "share of the way", series, log="x")]
        if series
        else []
    )
    return Section("One link over a long path", blocks, compared, pictures)


def latency(document: Document) -> Section:
    stages = ("opened_s", "receiving_s", "received_s", "staged_s", "first_live_s", "live_s", "beyond_s")
    blocks = [
        f"A hub and {document['peers']} peers at {figure(document['rate_bps'] / 1e6)} Mbit/s, a state of "
        f"{figure(document['state_bytes'] / 1e6)} MB. Milliseconds from `publish()`, or from a folder's rename, until "
        f"the last peer has reached each stage; medians of {document['rounds']} versions. *Beyond*: the last live "
        "peer, less transfer and half round trips.",
        table(
            ["source", "round trip, ms", "delta, kB", "begun", "first message", "received", "staged", "first peer live",
             "last peer live", "beyond"],
            (
                [row["source"], 1e3 * row["rtt_s"], row["bytes"] / 1e3, *(round(1e3 * row[stage]) for stage in stages)]
                for row in document["rows"]
            ),
        ),
    ]  # fmt: skip
    compared = [
        Comparison("latency", f"beyond transfer and way in ms, {row['source']}, {row['bytes'] / 1e3:.0f} kB",
                   1e3 * row["beyond_s"], 1e3 * BEYOND_S[row["source"]])
        for row in document["rows"]
        if row["bytes"] < SMALL_BYTES and row["rtt_s"] <= NEAR_S
    ]  # fmt: skip
    return Section("Small versions", blocks, compared)


def faults(document: Document) -> Section:
    rows = document["rows"]
    groups: dict[tuple[str, str], list[Document]] = {}
    for row in rows:
        groups.setdefault((row["fault"], row["position"]), []).append(row)
    blocks = [
        f"A hub and five peers in two chains, versions of {document['payload_bytes'] / MIB:.3g} MiB at "
        f"{figure(document['rate_bits_s'] / 1e6)} Mbit/s. Each fault is injected at each place, at the start, in the "
        f"middle and at the last pieces. Undisturbed {document['undisturbed_s']:.2f} s. *Gap*: the longest time in "
        "which an incomplete survivor received nothing, without the hub's absence. Bytes sent twice: "
        f"{document['bytes_duplicate']}; cases with other bits: {document['wrong']}.",
        table(
            ["fault", "at", "gap, s: median", "worst", "all peers have it, s: median", "worst"],
            (
                [
                    fault, position, *(f"{pick(_gap(r) for r in some):.2f}" for pick in (median, max)),
                    *(f"{pick([r['all_s'] for r in some]):.2f}" for pick in (median, max)),
                ]
                for (fault, position), some in groups.items()
            ),
        ),
    ]  # fmt: skip
    compared = [
        Comparison("faults", "bytes sent twice", document["bytes_duplicate"], 0),
        Comparison("faults", "cases with other bits", document["wrong"], 0),
        *(
            Comparison("faults", f"gap in s, {r['fault']} {r['position']} {r['moment']}", _gap(r), FLOW_S)
            for r in rows
            if r["fault"] in ("kill", "several")
        ),
        *(
            Comparison(
                "faults",
                f"until all peers have it in s, {r['fault']} {r['position']} {r['moment']}",
                r["all_s"],
                r["most_s"],
            )
            for r in rows
        ),
    ]
    return Section("Faults", blocks, compared)


def _gap(row: Document) -> float:
    return max(0.0, float(row["gap_s"]) - float(row["outage_s"]))

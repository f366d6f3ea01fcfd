"""Report sections about bytes: the codec beside other systems' formats, squashes, and catching up by squashes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from netem.bench.figures_text import Columns, Row
from netem.lab.scenario import Requirement
from netem.report.section_text import (
    Figures,
    Picture,
    RivalComparison,
    Section,
    data_of,
    figure,
    judged,
    share,
    table,
    table_of,
)

Document = Mapping[str, Any]
OURS: Final = ("context", "flat")
"""The p2pcast formats for sparse deltas, between which hubs choose."""
NAMES: Final = {
    "context": "p2pcast, `context`", "flat": "p2pcast, `flat`", "dense": "p2pcast, `dense`", "raw": "everything, raw",
    "pulse": "PULSE", "sparrowrl": "SparrowRL", "xor_zstd": "XOR + zstd-1", "int32_bf16": "int32 + bf16",
}  # fmt: skip
SIZES: Final = {
    "pulse": "pulse_bytes",
    "sparrowrl": "sparrowrl_bytes",
    "xor_zstd": "xor_zstd_bytes",
    "int32_bf16": "absolute_bytes",
}
MODEL: Final = "8B"
RATES: Final = (0.1, 1, 10)
"""Links of the model that the page shows, in Gbit/s."""
CHOSEN: Final = "by predicted time"
"""The default policy of a peer that catches up."""


def codec(document: Document) -> Section:
    rows, formats = document["rows"], [row | {"name": NAMES[row["format"]]} for row in document["formats"]["rows"]]
    datasets = [row["dataset"] for row in rows]
    smaller = {f"p2pcast, `{document['codec']}`": [row["dense_bytes"] / row["bytes"] for row in rows]}
    smaller["entropy given tensor and exponent"] = [row["dense_bytes"] / row["entropy_bytes"] for row in rows]
    for name, key in SIZES.items():
        if all(key in row for row in rows):
            smaller[NAMES[name]] = [row["dense_bytes"] / row[key] for row in rows]
    model = document["end_to_end"]
    predicted = [row | {"name": NAMES[row["format"]]} for row in model["rows"] if row["model"] == MODEL]
    at = [model["gbit_s"].index(rate) for rate in RATES if rate in model["gbit_s"]]
    seconds = {row["format"]: [row["seconds"][n] for n in at] for row in predicted}
    speeds: Columns = [
        ("format", "name"), ("× smaller", "times_smaller"), ("encode ÷ scan", "encode_vs_scan"),
        ("decode ÷ scan", "decode_vs_scan"),
    ]  # fmt: skip
    given = data_of(formats, speeds)
    blocks = [
        f"One AdamW step of real pretrained weights ({datasets[0]}, {share(rows[0]['changed'] / rows[0]['params'])} "
        "changed): the state's bytes ÷ the delta's, and the speed of one core ÷ that of a compare-and-compact scan "
        f"({figure(document['formats']['scan_gb_s'])} GB/s). Other systems' formats are reimplemented in NumPy and "
        "zstd, without hashes: PULSE (2-D or 1-D, the smaller; zstd-1), SparrowRL (LEB128, raw values), XOR + zstd-1 "
        "(slime, SkyRL), int32 + bf16 (verl). p2pcast makes and checks digests. The last columns are a model: seconds "
        f"until a peer has decoded a version of {MODEL} parameters over such a link, with {model['encode_cores']} "
        "cores at either end that scale without loss.",
        table(
            [*given.headings, *(f"{figure(model['gbit_s'][n])} Gbit/s" for n in at)],
            ([*row, *seconds.get(one["format"], [])] for row, one in zip(given.rows, formats, strict=True)),
        ),
        f"Two cores beside one: encoding {figure(document['encode_two_cores'])} ×, decoding "
        f"{figure(document['decode_two_cores'])} ×.",
    ]
    data = {
        "codec-sizes": Figures(["times smaller", *datasets], [[name, *times] for name, times in smaller.items()]),
        "codec-links": Figures(["Gbit/s", *model["gbit_s"]], [[row["name"], *row["seconds"]] for row in predicted]),
    }
    others = (f"{NAMES[key]} {figure(smaller[NAMES[key]][0])}" for key in SIZES if NAMES[key] in smaller)
    best = [
        f"a step's delta, times smaller than the state ({datasets[0]})",
        next(iter(smaller.values()))[0],
        ", ".join(others),
    ]
    compared = [*_sizes(rows), *_speeds(document, formats), *_links(model["gbit_s"], predicted)]
    links = {
        r["name"]: dict(zip(model["gbit_s"], r["seconds"], strict=True)) for r in predicted if r["format"] != "dense"
    }
    times = {name: dict(zip(datasets, values, strict=True)) for name, values in smaller.items()}
    title, by_link = "a step's delta: times smaller than the state", f"{MODEL}: from trainer to peer, by link (model)"
    pictures = [
        Picture("codec-sizes", title, "", "× smaller", times, bars=True),
        Picture("codec-links", by_link, "Gbit/s", "s", links, log="xy"),
    ]
    return Section("Delta size and speed", blocks, compared, pictures, data, [best])


def _sizes(rows: list[Row]) -> Iterator[RivalComparison]:
    for row in rows:
        for name, key in SIZES.items():
            yield from judged("codec", [row], Requirement("bytes", "bytes", below=key), NAMES[name], case="{dataset}")
    for row in rows:
        for what, key, bar in (("entropy", "ratio_to_entropy", 1.04), ("PULSE's", "ratio_to_pulse", 0.205)):
            yield from judged("codec", [row], Requirement(f"bytes ÷ {what}", key, below=bar), case="{dataset}")


def _speeds(document: Document, formats: list[Row]) -> Iterator[RivalComparison]:
    """The bars, and each rival beside each p2pcast format for sparse deltas."""
    for name, key, bar in (("context", "encode", 0.35), ("context", "decode", 0.35), ("flat", "encode", 0.6)):
        hold = Requirement(f"{key} ÷ scan", f"{key}_vs_scan", {"format": (name,)}, above=bar)
        yield from judged("codec", formats, hold, case="`{format}`")
    for key, what in (("encode", "encoding"), ("decode", "decoding")):
        yield from judged("codec", [document], Requirement("two cores ÷ one", f"{key}_two_cores", above=1.8), case=what)
    for rival in (row["format"] for row in formats if row["format"] in SIZES):
        for name in (row["format"] for row in formats if row["format"] in OURS):
            for key, what in (("encode_vs_scan", "encode"), ("decode_vs_scan", "decode")):
                hold = Requirement(f"{what} ÷ scan", key, {"format": (name,)}, {"format": (rival,)}, above=1.0)
                yield from judged("codec", formats, hold, "{name}", case=f"`{name}`")


def _links(gbit_s: list[float], predicted: list[Row]) -> Iterator[RivalComparison]:
    """At each link rate, the best p2pcast format beside each rival."""
    rows = {row["format"]: row for row in predicted}
    for at, rate in enumerate(gbit_s):
        ours: dict[str, Any] = {"best": min(rows[name]["seconds"][at] for name in OURS)}
        for name in (name for name in SIZES if name in rows):
            hold = Requirement(f"s for {MODEL} (model)", "best", below="rival")
            one = ours | {"rival": rows[name]["seconds"][at]}
            yield from judged("codec", [one], hold, NAMES[name], case=f"{rate:g} Gbit/s")


def squash(document: Document) -> Section:
    blocks, series, every = [], {}, []
    for run in document["rows"]:
        codecs = list(run["sizes"])
        blocks += [
            f"{run['dataset']}: the bytes of k consecutive deltas combined into one ÷ those of the chain; a state of "
            f"{figure(run['dense_bytes'] / 1e6)} MB.",
            table(
                ["k", "changed", *(f"`{name}`" for name in codecs)],
                (
                    [row["k"], share(row["changed"] / run["params"]), *(row[name]["ratio"] for name in codecs)]
                    for row in run["rows"]
                ),
            ),
        ]
        for name in codecs:
            series[f"{run['dataset']}, {name}"] = {row["k"]: row[name]["ratio"] for row in run["rows"]}
            sizes = ((row["k"], row[name]["chain_bytes"], row[name]["squash_bytes"]) for row in run["rows"])
            every += [[run["dataset"], name, *each] for each in sizes]
    picture = Picture("squash", "a squash of k deltas ÷ the chain of them", "k", "÷ chain", series, log="x")
    data = {"squash": Figures(["dataset", "codec", "k", "chain_bytes", "squash_bytes"], every)}
    return Section("Squashes", blocks, (), [picture], data)


def catchup(document: Document) -> Section:
    rows = document["rows"]
    columns: Columns = [
        ("way", "way"), ("artifacts", "artifacts"), ("bytes", "bytes"), ("÷ every delta", "to_chain"),
        ("÷ one exact squash", "to_exact"), ("s", "seconds"),
    ]  # fmt: skip
    blocks = [
        f"A peer that is {document['versions']} versions behind joins over {figure(document['rate_bits_s'] / 1e6)} "
        f"Mbit/s ({figure(document['state_bytes'] / 1e6)} MB of weights, codec `{document['codec']}`): seconds until "
        "the newest version is staged, including the making of a squash.",
        table_of(rows, columns),
    ]
    fastest = min(rows, key=lambda row: float(row["seconds"]))
    chosen = [row | {"fastest": fastest["seconds"]} for row in rows]
    hold = Requirement("s until staged, by the peer's policy", "seconds", {"way": (CHOSEN,)}, below="fastest")
    return Section("Coming back", blocks, list(judged("catchup", chosen, hold, fastest["way"])))

"""Report sections about bytes: the codec beside other systems' formats, squashes, and catching up by squashes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from netem.bench.figures_text import Columns, Row
from netem.lab.scenario import Requirement
from netem.report.section_text import Picture, RivalComparison, Section, figure, judged, share, table, table_of

Document = Mapping[str, Any]
OURS: Final = ("context", "flat")
"""The p2pcast formats for sparse deltas, between which hubs choose."""
NAMES: Final = {
    "context": "p2pcast, `context`", "flat": "p2pcast, `flat`", "dense": "p2pcast, `dense`", "raw": "everything, raw",
    "pulse": "PULSE (2-D or 1-D, the smaller; zstd-1)", "sparrowrl": "SparrowRL (LEB128, raw values)",
    "xor_zstd": "XOR + zstd-1 (slime, SkyRL)", "int32_bf16": "int32 + bf16 (verl)",
}  # fmt: skip
SIZES: Final = {
    "pulse": "pulse_bytes",
    "sparrowrl": "sparrowrl_bytes",
    "xor_zstd": "xor_zstd_bytes",
    "int32_bf16": "absolute_bytes",
}
MODEL: Final = "8B"
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
    columns: Columns = [
        ("format", "name"), ("× smaller", "times_smaller"), ("÷ PULSE", "ratio_to_pulse"),
        ("encode ÷ scan", "encode_vs_scan"), ("decode ÷ scan", "decode_vs_scan"),
    ]  # fmt: skip
    model = document["end_to_end"]
    predicted = [row | {"name": NAMES[row["format"]]} for row in model["rows"] if row["model"] == MODEL]
    blocks = [
        "Real pretrained weights under real AdamW steps. The state size divided by the delta size:",
        table(
            ["format", *(f"{row['dataset']}, {share(row['changed'] / row['params'])} changed" for row in rows)],
            ([name, *times] for name, times in smaller.items()),
        ),
        f"Speeds of one core, on {document['formats']['dataset']}, all in turns; *scan* is a bare compare-and-compact "
        f"scan at {figure(document['formats']['scan_gb_s'])} GB/s. The other systems' formats are reimplemented in "
        "NumPy and zstd. Their changes are found by that scan, without the hashes of those systems; p2pcast makes and "
        "checks digests.",
        table_of(formats, columns),
        f"Two cores beside one: encoding {figure(document['encode_two_cores'])} ×, decoding "
        f"{figure(document['decode_two_cores'])} ×.",
        f"Predicted from these costs for a model of {MODEL} and {model['encode_cores']} cores at either end: seconds "
        "until a peer has decoded a version, by link in Gbit/s. This is a model and not a measurement. Cores are "
        "assumed to scale without loss. Formats overlap encoding, sending and decoding if their systems do.",
        table(["format", *map(figure, model["gbit_s"])], ([row["name"], *row["seconds"]] for row in predicted)),
    ]
    compared = [*_sizes(rows), *_speeds(document, formats), *_links(model["gbit_s"], predicted)]
    title = f"{MODEL}: from trainer to a peer, by link (model)"
    links = {
        r["name"]: dict(zip(model["gbit_s"], r["seconds"], strict=True)) for r in predicted if r["format"] != "dense"
    }
    times = {name: dict(zip(datasets, values, strict=True)) for name, values in smaller.items()}
    pictures = [
        Picture(
            "codec-sizes", "delta of one step: times smaller than the whole state", "", "× smaller", times, bars=True
        ),
        Picture("codec-links", title, "Gbit/s", "s", links, log="xy"),
    ]
    return Section("Delta size and speed", blocks, compared, pictures)


def _sizes(rows: list[Row]) -> Iterator[RivalComparison]:
    for row in rows:
        for name, key in SIZES.items():
            yield from judged("codec", [row], Requirement("bytes, {dataset}", "bytes", below=key), NAMES[name])
    for row in rows:
        yield from judged("codec", [row], Requirement("bytes ÷ entropy, {dataset}", "ratio_to_entropy", below=1.04))
        yield from judged("codec", [row], Requirement("bytes ÷ PULSE's, {dataset}", "ratio_to_pulse", below=0.205))


def _speeds(document: Document, formats: list[Row]) -> Iterator[RivalComparison]:
    """The bars, and each rival beside each p2pcast format for sparse deltas."""
    for name, key, bar in (("context", "encode", 0.35), ("context", "decode", 0.35), ("flat", "encode", 0.6)):
        hold = Requirement(f"{key} ÷ scan, `{{format}}`", f"{key}_vs_scan", {"format": (name,)}, above=bar)
        yield from judged("codec", formats, hold)
    for key, what in (("encode", "encoding"), ("decode", "decoding")):
        yield from judged("codec", [document], Requirement(f"{what} on two cores ÷ one", f"{key}_two_cores", above=1.8))
    for rival in (row["format"] for row in formats if row["format"] in SIZES):
        for name in (row["format"] for row in formats if row["format"] in OURS):
            for key, what in (("encode_vs_scan", "encoding"), ("decode_vs_scan", "decoding")):
                hold = Requirement(
                    f"{what}, `{{format}}`, ÷ scan", key, {"format": (name,)}, {"format": (rival,)}, above=1.0
                )
                yield from judged("codec", formats, hold, "{name}")


def _links(gbit_s: list[float], predicted: list[Row]) -> Iterator[RivalComparison]:
    """At each link rate, the best p2pcast format beside each rival."""
    rows = {row["format"]: row for row in predicted}
    for at, rate in enumerate(gbit_s):
        ours: dict[str, Any] = {"best": min(rows[name]["seconds"][at] for name in OURS)}
        for name in (name for name in SIZES if name in rows):
            hold = Requirement(f"{MODEL} at {rate:g} Gbit/s, s (model)", "best", below="rival")
            yield from judged("codec", [ours | {"rival": rows[name]["seconds"][at]}], hold, NAMES[name])


def squash(document: Document) -> Section:
    blocks, series = [], {}
    for run in document["rows"]:
        codecs = list(run["sizes"])

        def sizes(row: Row, name: str) -> str:
            part = row[name]
            sizes = f"{part['chain_bytes'] / 1e6:.2f} → {part['squash_bytes'] / 1e6:.2f}"
            return f"{sizes} ({figure(part['ratio'])})"

        blocks += [
            f"{run['dataset']}: k consecutive deltas combined into one; the state has "
            f"{figure(run['dense_bytes'] / 1e6)} MB.",
            table(
                ["k", "changed", *(f"`{name}`: chain → squash, MB (÷ chain)" for name in codecs)],
                (
                    [row["k"], share(row["changed"] / run["params"]), *(sizes(row, name) for name in codecs)]
                    for row in run["rows"]
                ),
            ),
        ]
        for name in codecs:
            series[f"{run['dataset']}, {name}"] = {row["k"]: row[name]["ratio"] for row in run["rows"]}
    picture = Picture("squash", "a squash of k deltas ÷ the chain of them", "k", "÷ chain", series, log="x")
    return Section("Squashes", blocks, (), [picture])


def catchup(document: Document) -> Section:
    rows = document["rows"]
    columns: Columns = [
        ("way", "way"), ("artifacts", "artifacts"), ("bytes", "bytes"), ("÷ every delta", "to_chain"),
        ("÷ one exact squash", "to_exact"), ("s", "seconds"),
    ]  # fmt: skip
    blocks = [
        f"A peer that lacks {document['versions']} versions, over {figure(document['rate_bits_s'] / 1e6)} Mbit/s, "
        f"with {figure(document['state_bytes'] / 1e6)} MB of weights, codec `{document['codec']}`, real processes. "
        "Seconds from joining until the newest version is staged, including the making of a squash.",
        table_of(rows, columns),
    ]
    fastest = min(rows, key=lambda row: float(row["seconds"]))
    chosen = [row | {"fastest": fastest["seconds"]} for row in rows]
    hold = Requirement("s, by policy of the peer", "seconds", {"way": (CHOSEN,)}, below="fastest")
    return Section("Coming back", blocks, list(judged("catchup", chosen, hold, fastest["way"])))

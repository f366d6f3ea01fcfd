"""Report sections about bytes: the codec beside other systems' formats, squashes, and catching up by squashes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netem.report.section_text import Comparison, Picture, Section, figure, share, table

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
TO_ENTROPY, TO_PULSE, CONTEXT_TO_SCAN, FLAT_TO_SCAN, TWO_CORES = 1.04, 0.205, 0.35, 0.6, 1.8
MODEL: Final = "8B"
CHOSEN: Final = "by predicted time"
"""The default policy of a peer that catches up."""


def codec(document: Document) -> Section:
    rows = document["rows"]
    datasets = [row["dataset"] for row in rows]
    smaller = {f"p2pcast, `{document['codec']}`": [row["dense_bytes"] / row["bytes"] for row in rows]}
    smaller["entropy given tensor and exponent"] = [row["dense_bytes"] / row["entropy_bytes"] for row in rows]
    for name, key in SIZES.items():
        if all(key in row for row in rows):
            smaller[NAMES[name]] = [row["dense_bytes"] / row[key] for row in rows]
    formats = document["formats"]["rows"]
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
        table(
            ["format", "× smaller", "÷ PULSE", "encode ÷ scan", "decode ÷ scan"],
            (
                [NAMES[r["format"]], r["times_smaller"], r["ratio_to_pulse"], r["encode_vs_scan"], r["decode_vs_scan"]]
                for r in formats
            ),
        ),
        f"Two cores beside one: encoding {figure(document['encode_two_cores'])} ×, decoding "
        f"{figure(document['decode_two_cores'])} ×.",
        *_times(document["end_to_end"]),
    ]
    compared = [
        *(loss for row in rows for loss in _against(row["dataset"], row)),
        *_bars(document, formats),
        *_speeds(formats),
        *_links(document["end_to_end"]),
    ]
    picture = Picture(
        "codec-sizes", "delta of one step: times smaller than the whole state", "", "× smaller",
        {name: dict(zip(datasets, times, strict=True)) for name, times in smaller.items()}, bars=True,
    )  # fmt: skip
    return Section("Delta size and speed", blocks, compared, [picture, _picture(document["end_to_end"])])


def _against(dataset: str, row: Document) -> list[Comparison]:
    return [
        Comparison("codec", f"bytes, {dataset}", row["bytes"], row[key], NAMES[name])
        for name, key in SIZES.items()
        if key in row
    ]


def _bars(document: Document, formats: list[Document]) -> list[Comparison]:
    where = "codec"
    found = []
    for row in document["rows"]:
        found.append(Comparison(where, f"bytes ÷ entropy, {row['dataset']}", row["ratio_to_entropy"], TO_ENTROPY))
        found.append(Comparison(where, f"bytes ÷ PULSE's, {row['dataset']}", row["ratio_to_pulse"], TO_PULSE))
    speed = {row["format"]: row for row in formats}
    found.append(
        Comparison(where, "encode ÷ scan, `context`", speed["context"]["encode_vs_scan"], CONTEXT_TO_SCAN, less=False)
    )
    found.append(
        Comparison(where, "decode ÷ scan, `context`", speed["context"]["decode_vs_scan"], CONTEXT_TO_SCAN, less=False)
    )
    found.append(Comparison(where, "encode ÷ scan, `flat`", speed["flat"]["encode_vs_scan"], FLAT_TO_SCAN, less=False))
    found.append(Comparison(where, "encoding on two cores ÷ one", document["encode_two_cores"], TWO_CORES, less=False))
    found.append(Comparison(where, "decoding on two cores ÷ one", document["decode_two_cores"], TWO_CORES, less=False))
    return found


def _speeds(formats: list[Document]) -> list[Comparison]:
    """Each rival beside each p2pcast format for sparse deltas."""
    found = []
    ours = [row for row in formats if row["format"] in OURS]
    for rival in (row for row in formats if row["format"] in SIZES):
        for row in ours:
            for key, what in (("encode_vs_scan", "encoding"), ("decode_vs_scan", "decoding")):
                name = f"{what}, `{row['format']}`, ÷ scan"
                found.append(Comparison("codec", name, row[key], rival[key], NAMES[rival["format"]], less=False))
    return found


def _times(found: Document) -> list[str]:
    rows = [row for row in found["rows"] if row["model"] == MODEL]
    return [
        f"Predicted from these costs for a model of {MODEL} and {found['encode_cores']} cores at either end: seconds "
        "until a peer has decoded a version, by link in Gbit/s. This is a model and not a measurement. Cores are "
        "assumed to scale without loss. Formats overlap encoding, sending and decoding if their systems do.",
        table(["format", *map(figure, found["gbit_s"])], ([NAMES[row["format"]], *row["seconds"]] for row in rows)),
    ]


def _links(found: Document) -> list[Comparison]:
    """At each link rate, the best p2pcast format beside each rival."""
    rows = {row["format"]: row["seconds"] for row in found["rows"] if row["model"] == MODEL}
    losses = []
    for at, gbit_s in enumerate(found["gbit_s"]):
        best = min(rows[name][at] for name in OURS)
        what = f"{MODEL} at {gbit_s:g} Gbit/s, s (model)"
        losses += [Comparison("codec", what, best, rows[name][at], NAMES[name]) for name in SIZES if name in rows]
    return losses


def _picture(found: Document) -> Picture:
    rows = [row for row in found["rows"] if row["model"] == MODEL and row["format"] != "dense"]
    series = {NAMES[row["format"]]: dict(zip(found["gbit_s"], row["seconds"], strict=True)) for row in rows}
    return Picture("codec-links", f"{MODEL}: from trainer to a peer, by link (model)", "Gbit/s", "s", series, log="xy")


def squash(document: Document) -> Section:
    blocks, series = [], {}
    for run in document["rows"]:
        codecs = list(run["sizes"])
        heads = [f"`{name}`: chain → squash, MB (÷ chain)" for name in codecs]
        blocks += [
            f"{run['dataset']}: k consecutive deltas combined into one; the state has "
            f"{figure(run['dense_bytes'] / 1e6)} MB.",
            table(
                ["k", "changed", *heads],
                (
                    [
                        row["k"], share(row["changed"] / run["params"]),
                        *(
                            f"{row[c]['chain_bytes'] / 1e6:.2f} → {row[c]['squash_bytes'] / 1e6:.2f} "
                            f"({figure(row[c]['ratio'])})"
                            for c in codecs
                        ),
                    ]
                    for row in run["rows"]
                ),
            ),
        ]  # fmt: skip
        for name in codecs:
            series[f"{run['dataset']}, {name}"] = {row["k"]: row[name]["ratio"] for row in run["rows"]}
    return Section(
        "Squashes",
        blocks,
        (),
        [Picture("squash", "a squash of k deltas ÷ the chain of them", "k", "÷ chain", series, log="x")],
    )


def catchup(document: Document) -> Section:
    rows = document["rows"]
    named = {row["way"]: row for row in rows}
    blocks = [
        f"A peer that lacks {document['versions']} versions, over {figure(document['rate_bits_s'] / 1e6)} Mbit/s, "
        f"with {figure(document['state_bytes'] / 1e6)} MB of weights, codec `{document['codec']}`, real processes. "
        "Seconds from joining until the newest version is staged, including the making of a squash.",
        table(
            ["way", "artifacts", "bytes", "÷ every delta", "÷ one exact squash", "s"],
            (
                [r["way"], r["artifacts"], r["bytes"], r["to_chain"], r["to_exact"], r["seconds"]]
                for r in rows
            ),
        ),
    ]  # fmt: skip
    compared = []
    if CHOSEN in named:
        fastest = min(rows, key=lambda row: float(row["seconds"]))
        compared.append(
            Comparison(
                "catchup", "s, by policy of the peer", named[CHOSEN]["seconds"], fastest["seconds"], fastest["way"]
            )
        )
    return Section("Coming back", blocks, compared)

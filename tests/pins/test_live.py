"""Outputs of a hub and its peers in a real run: /status, metrics, events, answers over HTTP, folders, printed JSON."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
import shapes
from gathering import FAR, HUB, NEAR, document
from live import Answer, Seen
from pinned import GOLDEN, ROOT, WRITING, check
from prometheus_client.parser import text_string_to_metric_families


@pytest.mark.parametrize(("role", "names"), [("hub", (HUB,)), ("peer", (NEAR, FAR))])
def test_status_keys_match_the_pin(seen: Seen, role: str, names: tuple[str, ...]) -> None:
    """A path is ``always`` there where the settled run has it. Others need not come; any value may be null."""
    found = without_null(shapes.paths(status for name in names for status in seen.statuses[name]))
    always = sorted(shapes.paths(seen.settled[name] for name in names))
    if not WRITING:
        found = with_what_came_by_chance(found, role, always)
    check(f"status_{role}", {"types": found, "always": always})


def without_null(found: shapes.Paths) -> shapes.Paths:
    return {at: types.replace("null | ", "").replace(" | null", "") for at, types in found.items()}


def with_what_came_by_chance(found: shapes.Paths, role: str, always: list[str]) -> shapes.Paths:
    """``found``, with those pinned types and paths that this run did not meet and need not meet."""
    pinned: shapes.Paths = json.loads((GOLDEN / f"status_{role}.json").read_text())["types"]
    out = {at: types for at, types in pinned.items() if at not in always}
    for at, types in found.items():
        met = at in pinned and "null" in (types, pinned[at])
        out[at] = pinned[at] if met else types
    return out


def families(text: str) -> dict[str, dict[str, Any]]:
    """Name as samples have it, without a histogram's endings → type and labels."""
    out = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("p2pcast_"):
            labels = {name for sample in family.samples for name in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            out[name] = {"type": family.type, "labels": sorted(labels), "samples": bool(family.samples)}
    return out


def served(seen: Seen) -> dict[str, dict[str, dict[str, Any]]]:
    peers = [families(seen.metrics[name]) for name in (NEAR, FAR, "a peer without its hub")]
    peer: dict[str, dict[str, Any]] = {}
    for found in peers:
        peer |= {name: row for name, row in found.items() if row["samples"] or name not in peer}
    return {"hub": families(seen.metrics[HUB]), "peer": peer}


def test_metrics_match_the_pin(seen: Seen) -> None:
    """Labels show where there is a sample; of some there is none in a run in which nothing goes wrong."""
    found = served(seen)
    if not WRITING:
        pinned = json.loads((GOLDEN / "metrics.json").read_text())
        for at, rows in found.items():
            for name, row in rows.items():
                if name in pinned[at] and not (row["samples"] and pinned[at][name]["samples"]):
                    rows[name] = {**pinned[at][name], "type": row["type"]}
    check("metrics", found)


def test_metrics_match_the_guide(seen: Seen) -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(p2pcast_\w+)(?:\{([\w,]+)\})?` \|", text, re.MULTILINE))
    guide = {name: sorted(labels.split(",")) if labels else [] for name, labels in rows.items()}
    check("metrics_in_the_guide", guide)
    for at, found in served(seen).items():
        for name, row in found.items():
            assert name in guide, f"{name} of a {at} is not in the guide"
            assert not row["samples"] or row["labels"] == guide[name], f"{name} of a {at}"


def test_events_over_http_are_among_the_pinned_kinds(seen: Seen) -> None:
    """Kinds and facts in the stream are those that `test_event_kinds` finds in source."""
    kinds = json.loads((GOLDEN / "event_kinds.json").read_text())
    always: dict[str, list[str]] = defaultdict(list)
    for name, events in seen.events.items():
        for kind, facts in events:
            if kind == "missed":
                continue
            forms = [{"time", "run", *form["facts"]} for form in kinds[kind]]
            more = [set(f) for form in kinds[kind] for f in form.get("and by first word", {}).values()]
            wanted = forms + [one | other for one in forms for other in more]
            assert set(facts) in wanted, f"{kind} at {name}: {sorted(facts)}"
            always[name].append(kind)
    assert {
        "opened",
        "sealed",
        "staged",
        "committed",
        "joined",
        "plan",
        "barrier",
        "kept",
        "mirrored",
        "evicted",
    } <= set(always[HUB])
    far = {"receiving", "received", "staged", "committed", "ready", "parent", "hub_lost", "mirror_used"}
    assert far <= set(always[FAR])


def test_a_late_reader_is_told_of_missed_events(seen: Seen) -> None:
    check(
        "event_missed",
        {name: shapes.paths(facts for kind, facts in told if kind == "missed") for name, told in seen.events.items()},
    )


def form(answer: Answer) -> dict[str, Any]:
    found = document(answer.text)
    return {"code": answer.code, "kind": answer.kind} | ({} if found is None else {"keys": shapes.paths([found])})


def test_routes_and_methods_answer_as_pinned(seen: Seen) -> None:
    routes = {
        name: {said: f"{a.code} {a.kind}" for said, a in answers.items() if re.match(r"[A-Z]+ /(?!wait\?)", said)}
        for name, answers in seen.answers.items()
    }
    check("http_routes", routes)


def test_answers_have_the_keys_that_were_pinned(seen: Seen) -> None:
    answers = {
        name: {said: form(a) for said, a in answers.items() if not re.match(r"[A-Z]+ /(?!wait\?)", said)}
        for name, answers in seen.answers.items()
    }
    check("http_answers", answers)


def test_texts_of_probes(seen: Seen) -> None:
    check("http_probes", {path: seen.answers[FAR][f"GET {path}"].text for path in ("/healthz", "/readyz")})


def test_folders_hold_the_files_that_were_pinned(seen: Seen) -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for name, paths in seen.folders.items():
        folders[whose(name)] |= {shapes.path(path) for path in paths}
    check("folders", {name: sorted(paths) for name, paths in folders.items()})


def test_documents_in_folders_have_the_keys_that_were_pinned(seen: Seen) -> None:
    found: dict[str, list[Any]] = defaultdict(list)
    for name, paths in seen.folders.items():
        for path, data in paths.items():
            if (inner := document(data.decode(errors="replace"))) is not None:
                found[f"{whose(name)}: {shapes.path(path)}"].append(inner)
    check("documents", {where: shapes.paths(inner) for where, inner in found.items()})


def whose(name: str) -> str:
    """Which of the peers heads the chain is chance: they are taken together."""
    return "peer" if name in (NEAR, FAR) else name


def test_commands_print_the_keys_that_were_pinned(seen: Seen) -> None:
    found = {}
    for said, (code, text) in seen.printed.items():
        assert text, f"{said}: nothing was printed, exit code {code}"
        printed = json.loads(text)
        if "leftovers" in printed:
            printed["leftovers"] = []  # leftovers of other processes are chance
        found[said] = {"code": code, "keys": shapes.paths([printed])}
    for said in ("status of a hub", "status of a peer"):
        found[said]["keys"] = sorted(json.loads(seen.printed[said][1]))
    check("printed", found)


def test_log_lines_have_the_keys_and_loggers_that_were_pinned(seen: Seen) -> None:
    keys = sorted({key for lines in seen.logs.values() for line in lines for key in line} - {"traceback"})
    levels = sorted({line["level"] for lines in seen.logs.values() for line in lines} - {"error"})
    assert set(levels) <= {"info", "warning"}
    check("log_lines", {"keys": keys})


def test_daemons_end_with_the_codes_that_were_pinned(seen: Seen) -> None:
    check("codes_of_daemons", seen.codes)

"""``p2pcast status`` shows any document that a daemon answers: names and errors come from other machines, and the
daemon may be of another release.
"""

from __future__ import annotations

import http.server
import io
import json
import threading

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from p2pcast.cli import cli
from p2pcast.cli.status import table
from p2pcast.ground.errors import P2PCastError

PEER = {
    "name": "a",
    "parent": "hub",
    "state": "idle",
    "staged": "0.1",
    "committed": "0.1",
    "bytes_received": 5,
    "bytes_duplicate": 0,
    "score": 50.0,
    "progress": {"version": "0.1", "pieces": 1, "of": 2},
    "link": {"dialled_by": "parent"},
    "engines": [
        {
            "name": "e",
            "ready": True,
            "staged": "0.1",
            "committed": "0.1",
            "pause_s": 0.1,
            "recomputed_tokens": 1,
            "error": None,
        }
    ],
}
HUB = {
    "role": "hub",
    "run": "ab" * 16,
    "version": "0.1",
    "chains": [["a"]],
    "uplink": {"bps": 1e9, "from": "assumed"},
    "last": {
        "version": "0.1",
        "kind": "delta",
        "bytes": 5,
        "dense_bytes": 50,
        "changed": 1,
        "params": 10,
        "time_to_last_s": 0.5,
    },
    "barrier": {
        "version": "0.1",
        "phase": "gather",
        "staged": 1,
        "ready": 2,
        "needed": 2,
        "deadline_s": 3,
        "waiting_for": ["a"],
        "last": {"version": "0.0", "outcome": "failed", "ready": 1, "staged": 0},
    },
    "mirror": {"url": "s3://x", "version": None, "pending_bytes": 3, "lag_versions": 1, "error": None},
    "skipped": {"step_1": "bad"},
    "peers": [PEER],
}


def shown(document: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True, color_system=None).print(table(document))
    return out.getvalue()


def test_a_hub_and_a_peer_are_shown():
    text = shown(HUB)
    for part in (
        "run abababababab  version 0.1",
        "10 x smaller",
        "waiting for a",
        "skipped step_1: bad",
        "a",
        "0.1 1/2",
        "100.0 ms",
        "1 tokens",
    ):
        assert part in text
    text = shown(PEER | {"role": "peer", "run": "cd" * 16, "hub": {"address": "h:1", "connected": False}})
    assert "hub h:1 (out of reach)" in text


@pytest.mark.parametrize("name", ["[/red]", "[bold]x", "\x1b[2J\x1b]0;owned\x07", "a\nb", "\ud800"])
def test_names_cannot_control_the_terminal(name):
    document = json.loads(
        json.dumps(HUB | {"peers": [PEER | {"name": name, "parent": name}], "version": name, "skipped": {name: name}})
    )
    text = shown(document)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    if name.isprintable():
        assert name in text


LEDGER = {
    "role": "ledger",
    "task": "sums",
    "learner": "0.7",
    "epoch": 2,
    "rule": "bounded",
    "staleness": 3,
    "ahead": 9,
    "groups": {"open": 5, "trained": 4},
    "batches": {"applied": 1},
    "leases": {"held": 12, "settled": 90},
    "results": {"accepted": 80, "rejected": 10},
    "rejections": {"stale": 10},
    "ages": {"in_flight": {"0": 8, "1": 4}, "in_queue": {}},
    "waiting_requests": 2,
    "hub_reached": False,
    "rejected_jobs": {},
    "newest_rejected_jobs": [],
    "rejected_prompts": 0,
    "newest_rejected_prompts": [],
    "idle": "",
    "delayed": "status: the ledger's database failed",
    "failures": [],
    "workers": [
        {
            "name": "gpu7",
            "leases": 12,
            "slots": 16,
            "served": "0.7",
            "accepted_tokens": 9000,
            "tokens_per_s": 120.5,
            "silent_s": 0.5,
            "price_usd_h": 2.5,
            "blamed": 1,
        }
    ],
}
SUMMARY = {"task": "sums", "learner": "0.7", "workers": 3, "silent_workers": 1, "leases": {"held": 4}, "age_s": 60.0}


KEYS = [*HUB, *PEER, *HUB["last"], *HUB["barrier"], *LEDGER, "probes", "engines", "x"]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=15,
)


def test_a_ledger_shows_groups_ages_faults_and_workers():
    text = shown(LEDGER)
    for part in (
        "task sums  learner at 0.7  epoch 2  rule bounded  staleness bound 3",
        "groups: 5 open, 4 trained; 9 ahead of the learner; batches: 1 applied",
        "leases: 12 held, 90 settled; 2 requests wait",
        "results: 80 accepted, 10 rejected (10 stale)",
        "in flight, by steps behind: 0: 8, 1: 4",
        "the hub is out of reach",
        "delayed: status: the ledger's database failed",
        "gpu7",
        "120 tokens/s",
        "1 malformed or forged",
    ):
        assert part in text, part
    assert "in queue" not in text


def test_a_ledger_shows_prompts_that_cannot_be_played_and_why_nothing_is_leased():
    jobs = [{"prompt": f"prompt {n} of seed 7", "reason": "failed play", "why": "KeyError: 'card'"} for n in range(8)]
    rejected = {"rejected_jobs": {"failed play": 9}, "newest_rejected_jobs": jobs}
    faulty = {"rejected_prompts": 2, "newest_rejected_prompts": [{"name": "prompt 3 (row 3)", "why": "no bytes"}]}
    text = shown(LEDGER | rejected | faulty | {"idle": "no worker asks for leases"})
    for part in (
        "rejected jobs: 9 failed play\n  prompt 5 of seed 7: failed play: KeyError: 'card'",
        "prompts of which no group can be made: 2\n  prompt 3 (row 3): no bytes",
        "nothing is leased: no worker asks for leases",
    ):
        assert part in text, part
    assert "prompt 4 of seed 7" not in text
    assert "nothing is leased" not in shown(LEDGER)
    assert "; nothing is leased: no prompts" in shown(HUB | {"rollouts": SUMMARY | {"idle": "no prompts"}})


def test_a_ledger_shows_engines_under_alarm_by_name():
    right = {"worker": "gpu7", "engine": "vllm:e", "version": "0.7", "kl": 2e-4, "floor": 1e-4, "alarm": False}
    wrong = right | {"worker": "gpu8", "kl": 0.03, "alarm": True}
    assert "probes" not in shown(LEDGER)
    assert "ALARM" not in shown(LEDGER | {"probes": {"engines": [right]}})
    text = shown(LEDGER | {"probes": {"engines": [right, wrong]}})
    assert "probes of 2 engines: KL to the learner at most 3.0e-02 nats a token" in text
    assert "ALARM: the weights of gpu8 are not those of version 0.7: KL 3.0e-02, floor 1.0e-04" in text
    text = shown(LEDGER | {"probes": {"engines": [], "missing": ["gpu9"]}})
    assert "probes of gpu9 fail: the weights are not checked" in text
    assert "probes of 2 engines fail" in shown(HUB | {"rollouts": SUMMARY | {"probe_missing": 2}})
    line = shown(HUB | {"rollouts": SUMMARY | {"probe_alarm": 1}})
    assert "ALARM: weights of 1 engines are not those of their version" in line


def test_a_hub_shows_a_line_on_the_rollouts():
    text = shown(HUB | {"rollouts": SUMMARY})
    assert "rollouts of sums: learner at 0.7, 3 workers (1 silent), 4 leases, 0 tokens/s" in text
    assert "the ledger has been silent for 60 s" in text
    assert "rollouts" not in shown(HUB | {"rollouts": None})


@given(ANY, st.sampled_from(sorted(HUB)), st.sampled_from(sorted(PEER)), ANY, ANY)
def test_any_status_document_is_shown(document, key, peer_key, value, other):
    shown(document)
    shown(HUB | {key: value})
    shown(HUB | {"peers": [PEER | {peer_key: value}, other]})
    shown(
        HUB
        | {
            "last": HUB["last"] | {"bytes": value, "changed": other},
            "barrier": HUB["barrier"] | {"deadline_s": value, "waiting_for": other},
        }
    )
    shown(HUB | {"rollouts": SUMMARY | {"leases": value, "age_s": other}})
    for name in LEDGER.keys() - {"role"}:
        shown(LEDGER | {name: value})
    shown(LEDGER | {"workers": [LEDGER["workers"][0] | {"tokens_per_s": value, "blamed": other}, value]})
    shown(PEER | {"role": "peer", "hub": value, "mirror": other, "engines": value})


def test_integers_beyond_any_float_are_shown():
    for key in PEER:
        shown(HUB | {"peers": [PEER | {key: 10**400}]})


@pytest.mark.parametrize(
    "answer", [b"[]", b"7", b'"x"', b"{", b"\xff", b"[" * 100_000, b'{"peers": [{"name": 1e999}], "chains": 7}']
)
def test_no_answer_is_a_traceback(answer):
    class Liar(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        done = CliRunner().invoke(cli, ["status", "--hub", url])
        server.shutdown()
    assert done.exception is None or isinstance(done.exception, P2PCastError), done.exception

"""``p2pcast status`` shows whatever a daemon answers: names and errors come from other machines, and the daemon may be of another release."""

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
from p2pcast.errors import P2PCastError

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
        {"name": "e", "ready": True, "staged": "0.1", "committed": "0.1", "pause_s": 0.1, "recomputed_tokens": 1, "error": None}
    ],
}
HUB = {
    "role": "hub",
    "run": "ab" * 16,
    "version": "0.1",
    "chains": [["a"]],
    "uplink": {"bps": 1e9, "from": "assumed"},
    "last": {"version": "0.1", "kind": "delta", "bytes": 5, "dense_bytes": 50, "changed": 1, "params": 10, "time_to_last_s": 0.5},
    "barrier": {"version": "0.1", "phase": "gather", "staged": 1, "ready": 2, "needed": 2, "deadline_s": 3, "waiting_for": ["a"], "last": {"version": "0.0", "outcome": "failed", "ready": 1, "staged": 0}},
    "mirror": {"url": "s3://x", "version": None, "pending_bytes": 3, "lag_versions": 1, "error": None},
    "skipped": {"step_1": "bad"},
    "peers": [PEER],
}  # fmt: skip


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
def test_names_are_shown_as_they_are_and_move_nothing(name):
    document = json.loads(
        json.dumps(HUB | {"peers": [PEER | {"name": name, "parent": name}], "version": name, "skipped": {name: name}})
    )
    text = shown(document)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    if name.isprintable():
        assert name in text


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*HUB, *PEER, *HUB["last"], *HUB["barrier"], "x"]), inner, max_size=5)
    ),
    max_leaves=15,
)


@given(ANY, st.sampled_from(sorted(HUB)), st.sampled_from(sorted(PEER)), ANY, ANY)
def test_whatever_the_answer_it_is_shown(document, key, peer_key, value, other):
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
    shown(PEER | {"role": "peer", "hub": value, "mirror": other, "engines": value})


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

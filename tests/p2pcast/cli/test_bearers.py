"""The sources of a command's bearer token, and the error without one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2pcast.cli.status import commit
from p2pcast.ground.errors import LocalError, RefusedError
from p2pcast.trust import bearer_tokens
from trainer_node.commands.tokens_and_evictions import token

ASKED: list[str | None] = []


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        ASKED.append(self.headers.get("Authorization"))
        self.rfile.read(int(self.headers["Content-Length"]))
        good = ASKED[-1] == "Bearer secret"
        body = json.dumps(
            {"target": "0.1", "id": "00"} if good else {"error": "with what lies in /state/http.token"}
        ).encode()
        self.send_response(200 if good else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    ASKED.clear()
    monkeypatch.delenv(bearer_tokens.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def state(folder: Path, url: str, text: str = "secret") -> Path:
    folder.mkdir(parents=True)
    (folder / "daemon.json").write_text(json.dumps({"http": url}))
    (folder / bearer_tokens.FILE).write_text(f"{text}\n")
    return folder


def ran(command, *words: object) -> str:
    return CliRunner().invoke(command, [str(w) for w in words], catch_exceptions=False, standalone_mode=False).stdout


def test_without_a_bearer_the_file_is_named(url):
    with pytest.raises(RefusedError, match=r"/state/http.token"):
        ran(commit, "0.1", "--hub", url)
    assert ASKED == [None]


@pytest.mark.parametrize("command", [(commit, "0.1"), (token, "revoke", "00")])
def test_a_bearer_is_found_by_state_file_and_environment(url, tmp_path, monkeypatch, command):
    where = state(tmp_path / "a", url)
    ran(*command, "--state", where)
    ran(*command, "--hub", url, "--bearer-file", where / bearer_tokens.FILE)
    monkeypatch.setenv(bearer_tokens.VARIABLE, "secret")
    ran(*command, "--hub", url)
    assert ASKED == ["Bearer secret"] * 3


def test_a_bearer_is_found_in_the_usual_place_by_the_daemons_address(url, tmp_path):
    state(tmp_path / "home" / "p2pcast" / "hub", "http://127.0.0.1:9", "another")
    state(tmp_path / "home" / "p2pcast" / "peer-a", url)
    ran(commit, "0.1", "--hub", url)
    assert ASKED == ["Bearer secret"]


def test_a_bearer_file_that_is_not_there_is_named(url, tmp_path):
    with pytest.raises(LocalError, match=r"cannot read the bearer file .*nowhere"):
        ran(commit, "0.1", "--hub", url, "--bearer-file", tmp_path / "nowhere")
    assert ASKED == []

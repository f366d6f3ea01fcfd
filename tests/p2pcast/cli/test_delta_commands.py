from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2pcast import offline
from p2pcast.checkpoint import Checkpoint
from p2pcast.cli.delta import delta
from p2pcast.cli.inspect import inspect
from p2pcast.cli.verify import verify
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RefusedError, RetryableError, UsageError

Make = Callable[..., Path]


@pytest.fixture
def run() -> Callable[..., Result]:
    def call(command: object, *args: object) -> Result:
        result = CliRunner().invoke(command, [str(a) for a in args])  # type: ignore[arg-type]
        assert result.exception is None or isinstance(result.exception, (P2PCastError, SystemExit)), result.exception
        return result

    return call


@pytest.fixture
def steps(tmp_path: Path, make_checkpoint: Make) -> Path:
    draw = random.Random(0)
    weights = bytearray(draw.randbytes(4000))
    for step in range(3):
        tensors = {"[red]w": ("BF16", [20, 100], bytes(weights)), "n\x1b[2J": ("F32", [2], bytes(8))}
        make_checkpoint(tmp_path / f"step_{step}", tensors, {"config.json": b"{}"})
        for _ in range(10):
            weights[draw.randrange(2000) * 2] ^= 1
    return tmp_path


def test_diff_squash_apply_verify(steps: Path, run: Callable[..., Result]) -> None:
    for n in range(2):
        done = run(delta, "diff", steps / f"step_{n}", steps / f"step_{n + 1}", "-o", steps / f"d{n}.p2pd", "--json")
        assert done.exit_code == 0
        report = json.loads(done.stdout)
        assert {"bytes", "dense_bytes", "params", "changed", "codec", "encode_s"} <= report.keys()
        assert report["dense_bytes"] == 4008
        assert report["params"] == 2002
        assert 0 < report["changed"] <= 10
        assert report["codec"] == {"none": 1, "context": 1}
    done = run(
        delta, "squash", steps / "d0.p2pd", steps / "d1.p2pd", "-o", steps / "s.p2pd", "--base", steps / "step_0"
    )
    assert "0.0 → 0.2" in done.stdout
    assert "throw-away key" in done.stderr
    done = run(delta, "apply", steps / "step_0", steps / "s.p2pd", "-o", steps / "out")
    assert done.exit_code == 0
    assert "version 0.2" in done.stdout
    done = run(verify, steps / "out", "--against", steps / "s.p2pd", "--json")
    assert json.loads(done.stdout)["ok"] is True
    done = run(verify, steps / "step_1", "--against", steps / "s.p2pd", "--json")
    assert json.loads(done.stdout)["ok"] is False
    assert isinstance(done.exception, IntegrityError)
    assert done.exception.exit_code == 3
    done = run(delta, "apply", steps / "step_1", steps / "s.p2pd", "-o", steps / "wrong", "--json")
    assert isinstance(done.exception, IntegrityError)
    assert not (steps / "wrong").exists()


def test_squash_of_deltas_in_context_takes_the_base(steps: Path, run: Callable[..., Result]) -> None:
    for n in range(2):
        offline.diff(steps / f"step_{n}", steps / f"step_{n + 1}", steps / f"c{n}.p2pd", codec="context")
    files = (steps / "c0.p2pd", steps / "c1.p2pd")
    done = run(delta, "squash", *files, "-o", steps / "s.p2pd")
    assert isinstance(done.exception, UsageError)
    assert "coded in context" in str(done.exception)
    assert "--base DIR" in str(done.exception)
    assert not (steps / "s.p2pd").exists()
    done = run(delta, "squash", *files, "-o", steps / "s.p2pd", "--base", steps / "step_0", "--json")
    assert json.loads(done.stdout)["codec"] == {"none": 1, "context": 1}
    assert run(delta, "apply", steps / "step_0", steps / "s.p2pd", "-o", steps / "out").exit_code == 0
    assert offline.state_digest(Checkpoint.open(steps / "out")) == offline.state_digest(
        Checkpoint.open(steps / "step_2")
    )
    done = run(delta, "squash", *files, "-o", steps / "t.p2pd", "--base", steps / "step_1")
    assert isinstance(done.exception, IntegrityError)
    assert "wrong base" in str(done.exception)
    done = run(delta, "squash", *files, "-o", steps / "t.p2pd", "--base", steps / "step_0", "--codec", "flat", "--json")
    assert json.loads(done.stdout)["codec"] == {"none": 1, "flat": 1}
    assert isinstance(
        run(delta, "squash", steps / "t.p2pd", "-o", steps / "u.p2pd", "--codec", "flat").exception, UsageError
    )


def test_usage(steps: Path, run: Callable[..., Result]) -> None:
    assert run(delta, "diff", steps / "step_0", "-o", "x").exit_code == 2
    assert run(delta, "diff", steps / "step_0", steps / "step_1").exit_code == 2
    assert run(delta, "diff", steps / "step_0", steps / "step_1", "-o", "x", "--codec", "zip").exit_code == 2
    assert run(delta, "squash", "-o", "x").exit_code == 2
    assert isinstance(run(delta, "diff", steps / "none", steps / "step_1", "-o", steps / "x").exception, LocalError)


def test_inspect_a_delta(steps: Path, run: Callable[..., Result]) -> None:
    offline.diff(steps / "step_0", steps / "step_1", steps / "d.p2pd")
    report = json.loads(run(inspect, steps / "d.p2pd", "--json").stdout)
    made = json.loads(run(delta, "diff", steps / "step_0", steps / "step_1", "-o", steps / "e.p2pd", "--json").stdout)
    assert report["changed"] == made["changed"]
    assert report["state"] == made["state"]
    assert (report["base"], report["version"], report["kind"]) == ("0.0", "0.1", "delta")
    assert [t["changed"] for t in report["tensors"]] == [made["changed"], 0]
    assert report["codecs"]["context"]["cells"] == 1
    assert report["files"] == [{"path": "config.json", "bytes": 2, "in_base": True}]
    shown = run(inspect, steps / "d.p2pd").stdout
    assert "[red]w" in shown
    assert "\x1b" not in shown
    offline.diff(steps / "step_0", steps / "step_1", steps / "dense.p2pd", codec="dense")
    report = json.loads(run(inspect, steps / "dense.p2pd", "--json").stdout)
    assert report["changed_exact"] is False
    assert "≤ 2,000" in run(inspect, steps / "dense.p2pd").stdout
    hurt = bytearray((steps / "d.p2pd").read_bytes())
    hurt[20] ^= 1
    (steps / "d.p2pd").write_bytes(hurt)
    assert isinstance(run(inspect, steps / "d.p2pd").exception, IntegrityError)


def test_inspect_lists_changed_tensors(steps: Path, run: Callable[..., Result]) -> None:
    offline.diff(steps / "step_0", steps / "step_1", steps / "d.p2pd", codec="flat")
    alone = json.loads(run(inspect, steps / "d.p2pd", "--json").stdout)
    based = json.loads(run(inspect, steps / "d.p2pd", "--base", steps / "step_0", "--lr", "1e-6", "--json").stdout)
    folders = json.loads(
        run(inspect, steps / "step_0", steps / "step_1", "--codec", "flat", "--lr", "1e-6", "--json").stdout
    )
    assert {"kind", "bytes", "changed", "total", "tensors", "findings", "learning_rate"} <= folders.keys()
    assert (folders["kind"], folders["codecs"]) == ("change", based["codecs"])
    assert folders["total"] == based["total"]
    assert alone["total"]["changed"] == based["total"]["changed"]
    assert (alone["total"]["magnitudes"], based["learning_rate"]) == (None, 1e-6)
    for told in (
        run(inspect, steps / "step_0", steps / "step_1", "--plot", steps / "p.png"),
        run(inspect, steps / "d.p2pd", "--plot", steps / "q.png"),
    ):
        assert "[red]w" in told.stdout
        assert "steps, in ULPs" in told.stdout
        assert "• " in told.stdout
        assert "\x1b" not in told.stdout
    assert (steps / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (steps / "q.png").read_bytes().startswith(b"\x89PNG")
    same = run(inspect, steps / "step_0", steps / "step_0", "--plot", steps / "r.png")
    assert "Nothing changed." in same.stdout


def test_inspect_refuses_different_layouts(steps: Path, run: Callable[..., Result]) -> None:
    offline.diff(steps / "step_0", steps / "step_1", steps / "d.p2pd")
    wrong = run(inspect, steps / "d.p2pd", "--base", steps / "step_1").exception
    assert isinstance(wrong, IntegrityError)
    assert "wrong base" in str(wrong)
    assert isinstance(run(inspect, steps / "step_0", "--lr", "1e-6").exception, UsageError)
    assert isinstance(run(inspect, steps / "step_0", "--base", steps / "step_1").exception, UsageError)
    assert isinstance(
        run(inspect, steps / "step_0", steps / "step_1", "--base", steps / "step_0").exception, UsageError
    )
    assert run(inspect, steps / "d.p2pd", "--lr", "0").exit_code == 2


def test_without_matplotlib(steps: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = run(inspect, steps / "step_0", steps / "step_1", "--plot", steps / "p.png").exception
    assert isinstance(error, LocalError)
    assert "pip install 'p2pcast[lab]'" in str(error)


def test_inspect_checkpoints(steps: Path, run: Callable[..., Result]) -> None:
    report = json.loads(run(inspect, steps / "step_0", "--json", "--digest").stdout)
    assert report["kind"] == "checkpoint"
    assert report["params"] == 2002
    assert report["state"] == f"{offline.state_digest(Checkpoint.open(steps / 'step_0')):016x}"
    assert [t["dtype"] for t in report["tensors"]] == ["F32", "BF16"]
    assert report["files"] == [{"path": "config.json", "bytes": 2}]
    shown = run(inspect, steps / "step_0").stdout
    assert "[red]w" in shown
    assert "\x1b" not in shown
    one = json.loads(run(inspect, steps / "step_0" / "model.safetensors", "--json").stdout)
    assert one["layout_id"] == report["layout_id"]


def test_inspect_other_things(tmp_path: Path, run: Callable[..., Result]) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "b.safetensors").write_bytes(b"hello")
    assert "neither" in str(run(inspect, tmp_path / "a").exception)
    assert "empty" in str(run(inspect, tmp_path / "empty").exception)
    assert isinstance(run(inspect, tmp_path / "b.safetensors").exception, IntegrityError)
    assert "no such file" in str(run(inspect, tmp_path / "none").exception)
    (tmp_path / "b.safetensors").unlink()
    assert isinstance(run(inspect, tmp_path).exception, LocalError)


class _Hub(HTTPServer):
    answer: tuple[int, bytes] = (200, b"{}")
    asked: str | None = None


class _Handler(BaseHTTPRequestHandler):
    server: _Hub

    def do_GET(self) -> None:
        self.server.asked = f"{self.path} {self.headers.get('Authorization')}"
        code, body = self.server.answer
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def hub() -> Iterator[_Hub]:
    with _Hub(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_verify_against_a_hub(steps: Path, run: Callable[..., Result], hub: _Hub) -> None:
    url = f"http://127.0.0.1:{hub.server_port}/"
    state = offline.state_digest(Checkpoint.open(steps / "step_1"))
    answer = {"layout_id": "ab", "digests": {"0.0": "00", "0.1": f"{state:016x}"}, "files": {}}
    hub.answer = 200, json.dumps(answer).encode()
    done = run(verify, steps / "step_1", "--against", url)
    assert done.exit_code == 0
    assert "version 0.1" in done.stdout
    assert hub.asked == "/files None"
    (steps / "token").write_text("secret\n")
    run(verify, steps / "step_1", "--against", url, "--token-file", steps / "token")
    assert hub.asked == "/files Bearer secret"
    done = run(verify, steps / "step_1", "--against", url, "--version", "0.0")
    assert isinstance(done.exception, IntegrityError)
    hub.answer = 200, json.dumps(answer | {"files": {"0.1": {"config.json": "00"}}}).encode()
    done = run(verify, steps / "step_1", "--against", url)
    assert "small file 'config.json'" in str(done.exception)
    hub.answer = 200, json.dumps(answer | {"files": {"0.1": 7}}).encode()
    assert isinstance(run(verify, steps / "step_1", "--against", url).exception, IntegrityError)
    for bad, kind in [
        ((401, b""), RefusedError),
        ((404, b""), LocalError),
        ((200, b"<html>"), LocalError),
        ((200, b"{}"), LocalError),
    ]:
        hub.answer = bad
        assert isinstance(run(verify, steps / "step_1", "--against", url).exception, kind)
    assert isinstance(
        run(verify, steps / "step_1", "--against", url, "--token-file", steps / "none").exception, LocalError
    )


def test_verify_against_an_unreachable_hub(steps: Path, run: Callable[..., Result]) -> None:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        port = server.server_port  # bound, then closed: no process listens there
    done = run(verify, steps / "step_1", "--against", f"http://127.0.0.1:{port}")
    assert isinstance(done.exception, RetryableError)
    assert done.exception.exit_code == 4

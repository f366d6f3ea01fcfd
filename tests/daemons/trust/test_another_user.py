"""Another user on the machine of a hub and a peer can read, call and impersonate nothing. Runs as the users root and
``nobody``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pcast.daemon.daemon_requests import ask, bearer_token, foreign_listener
from p2pcast.ground.errors import LocalError, RefusedError
from p2pcast.trust import bearer_tokens
from rollout_node.in_engine.install_frames import InstallClient

pytestmark = pytest.mark.root

OPENED = """
opened = []
for path in json.loads(sys.argv[1]):
    for how in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, how))
            opened.append(path)
        except (IsADirectoryError, PermissionError):
            pass
print(json.dumps(sorted(set(opened))))
"""

POSTED = """
url, calls = sys.argv[1], json.loads(sys.argv[2])
answers = []
for path, body in calls:
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            answers.append([answer.status, ""])
    except urllib.error.HTTPError as error:
        answers.append([error.code, json.load(error)["error"]])
print(json.dumps(answers))
"""

LISTENS = """
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
while True:
    other, _ = sock.accept()
    print("called", flush=True)
"""


@pytest.fixture
async def run(shared, swarm, states):
    """A hub and a peer with TLS and one live version, whose folders lie in a place that every user may read."""
    os.umask(0)
    swarm.plaintext = False
    swarm.folder = shared
    swarm.publish(1, states.first())
    await swarm.hub_up(commit="manual", shadow=shared / "hub-shadow", token_file=shared / "hub" / "token")
    (shared / "token").write_bytes((shared / "hub" / "token").read_bytes())
    os.chmod(shared / "token", 0o600)
    await swarm.peer_up("a", shadow=shared / "a-shadow")
    await swarm.published("0.1")
    assert (await swarm.post(swarm.hub, "/commit", {"version": "0.1"}))[0] == 200
    await swarm.live("0.1")
    yield swarm
    await swarm.all_down()


@pytest.fixture(autouse=True)
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


async def test_another_user_reads_nothing(run, shared, stranger):
    """With any umask: state, anchors, keys, shadow, patches, logs, the socket, and files installed into a folder that
    the peer has made.
    """
    made = [p for p in (path for path in shared.rglob("*")) if p.is_dir() or p.is_file() or p.is_socket()]
    names = {p.name for p in made}
    assert {
        "run.key",
        "http.token",
        "model.safetensors",
        "shadow.p2ps",
        "install.sock",
        "STABLE",
        "token",
        "trust.json",
    } <= names
    done = await asyncio.to_thread(stranger, OPENED, json.dumps([str(p) for p in made]))
    assert json.loads(done.stdout) == []


async def test_another_user_changes_nothing_over_http(run, stranger):
    hub, peer = run.hub, run.peers["a"]
    before = (await run.post(hub, "/token/list", {}))[1]
    calls = [
        ("/token/create", {"role": "trainer", "ttl_s": None}),
        ("/token/list", {}),
        ("/token/revoke", {"id": "00"}),
        ("/evict", {"peer": "a"}),
        ("/commit", {"version": "0.1"}),
    ]
    for daemon, asked, folder in (
        (hub, calls, "hub"),
        (peer, [("/verify", {"engine": None}), ("/commit", {"version": "newest"})], "a"),
    ):
        url = "http://{}:{}".format(*daemon.http.address)
        done = await asyncio.to_thread(stranger, POSTED, url, json.dumps([*asked, ("/status", None)]))
        *refused, read = json.loads(done.stdout)
        assert [code for code, _ in refused] == [401] * len(asked)
        assert all(str(run.folder / folder / bearer_tokens.FILE) in said for _, said in refused)
        assert read[0] == 200
    assert (await run.post(hub, "/token/list", {}))[1] == before
    assert not hub.state.admission.evicted


async def test_another_user_gets_nothing_from_the_install_socket(run, stranger):
    peer = run.peers["a"]
    os.chmod(run.folder / "a", 0o755)
    os.chmod(peer.engine.socket.path, 0o666)
    code = r"""
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
try:
    sock.sendall(b"\x0b\0\0\0\x81\xa2op\xa6layout"); print(sock.recv(10))
except ConnectionError:
    print(b"")
"""
    done = await asyncio.to_thread(stranger, code, peer.engine.socket.path)
    assert done.stdout.strip() == "b''"
    assert await asyncio.to_thread(InstallClient(peer.engine.socket.path).layout_document)


@pytest.fixture
def listens():
    """Start a process of the other user's that listens; gives its first line, and the process."""
    processes = []

    def start(code: str, *words: object) -> tuple[str, subprocess.Popen[str]]:
        drop = "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); os.umask(0)\n"
        command = [sys.executable, "-c", drop + code, *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip(), process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_worker_takes_no_weights_from_another_users_socket(shared, listens):
    code = (
        "sock = socket.socket(socket.AF_UNIX); sock.bind(sys.argv[1]); sock.listen(); print('up', flush=True); "
        "sock.accept()"
    )
    listens(code, shared / "install.sock")
    with pytest.raises(LocalError, match="belongs to a process of user 65534"):
        InstallClient(shared / "install.sock").layout_document()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_bearer_token_is_not_sent_to_another_users_listener(tmp_path: Path, listens, host):
    port, process = listens(LISTENS)
    url = f"http://{host}:{port}"
    (tmp_path / "daemon.json").write_text(json.dumps({"http": url}))
    (tmp_path / bearer_tokens.FILE).write_text("secret\n")
    with pytest.raises(RefusedError, match="a process of user 65534 listens there"):
        ask(url, "/commit", {"version": "0.1"}, state=tmp_path)
    process.kill()
    assert process.stdout.read() == ""  # no request arrived
    assert bearer_token(url, tmp_path) == "secret"
    assert foreign_listener("http://192.0.2.7:7078", 0) is None

"""Users' mistakes and machines' faults, through real processes: the right exit code and one clear line, never a
traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from netem.fleet.processes import free_port
from p2pcast.process.daemon_process import default_shadow
from p2pcast.trust.join_token import JoinToken

FAILED, USAGE, REFUSED, UNREACHABLE, UNREAD = 1, 2, 3, 4, 5
HERE = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--plaintext")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def checkpoint(folder: Path, words: int = 1000) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": np.arange(words, dtype=np.uint16)}, folder / "model.safetensors")
    (folder / "STABLE").touch()
    return folder


def explained(done: subprocess.CompletedProcess[str], code: int, *words: str) -> str:
    """The one line that says why; log lines may stand before it."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    reasons = [line for line in done.stderr.splitlines() if line.startswith(("p2pcast: ", "Error: "))]
    assert len(reasons) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == reasons[0]
    for word in words:
        assert word in reasons[0]
    # Another test's killed daemon may have left a shadow, which ``status`` lists.
    assert not [line for line in done.stdout.splitlines() if not line.startswith("shadow ")]
    return reasons[0]


@dataclass(frozen=True)
class Hub:
    folder: Path
    address: str
    http: str

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def token(self) -> JoinToken:
        return JoinToken.parse(self.token_file.read_text())


@contextlib.contextmanager
def daemon(
    until: str, *words: object, at: tuple[str, Callable[[], object]] = ("", str), env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A daemon that runs meanwhile; yields its log up to the line with ``until``. The daemon has to end without a
    traceback.

    ``at``: the action once a line holds some words.
    """
    command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
    environment = {**os.environ, **(env or {})}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        log = ""
        try:
            for line in process.stderr:
                log += line
                if at[0] and at[0] in line:
                    at[1]()
                if until in line:
                    break
            assert until in log, log
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        assert process.wait(600) == 0
        assert "Traceback" not in log + rest


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A real hub, with a version of 4 MB."""
    folder = tmp_path_factory.mktemp("hub")
    checkpoint(folder / "checkpoints" / "step_0", 2_000_000)
    words = ["seed", folder / "checkpoints", "--state", folder / "state", "--shadow", folder / "shadow", *HERE]
    with daemon("version 0.0", *words, "--token-file", folder / "token") as log:
        where = re.search(r"listening on (\S+), status at (http://\S+)/status", log)
        assert where is not None, log
        yield Hub(folder, where[1], where[2])


@pytest.fixture
def join_words(hub: Hub, tmp_path: Path) -> Callable[..., list[object]]:
    """Of ``p2pcast join`` at the hub, into folders of this test; ``token`` None: the hub's."""

    def words_of(*words: object, token: str | None = None, address: str = hub.address) -> list[object]:
        given = tmp_path / "token"
        given.write_text(str(hub.token) if token is None else token)
        out = f"safetensors:{tmp_path / 'out'}"
        folders = ["--state", tmp_path / "state", "--shadow", tmp_path / "shadow", "--install", out]
        return ["join", address, "--token-file", given, *folders, *HERE, *words]

    return words_of


@pytest.fixture
def join(p2pcast: Run, join_words: Callable[..., list[object]]) -> Run:
    """Runs ``join_words``."""
    return lambda *words, **given: p2pcast(*join_words(*words, **given))


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 256 KiB."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "p2pcast-test", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def bound() -> Iterator[str]:
    """An address that another socket listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


# -- the command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "nonsense"),
        (["seed", "--plaintext", "--max-lag", "-1"], "--max-lag"),
        (["seed", "x", "--plaintext", "--uplink", "fast"], "not a rate"),
        (["seed", "x", "--plaintext", "--listen", "here:there"], "not an address"),
        (["seed", "x", "--plaintext", "--listen", "::1:7077"], "goes in brackets"),
        (["join", "[fe80::1%eth0]:7077", "--install", "safetensors:x"], "has a scope"),
        (["seed", "x", "--plaintext", "--chains", "0"], "--chains"),
        (["join", "hub", "--install", "safetensors:x"], "P2PCAST_TOKEN"),
        (["join", "hub", "--install", "safetensors:x", "--token-file", "none"], "token file none"),
        (["token", "create", "--ttl", "soon"], "no span of time"),
        (["token", "create", "--role", "hub"], "--role"),
        (["token", "create", "--ttl", "never"], "--uses"),
        (["join", "hub", "--install", "safetensors:x", "--name", "DeadBeef"], "looks like a node's id"),
        (["join", "hub", "--install", "safetensors:x", "--name", ""], "is empty"),
        (["evict"], "PEER"),
        (["join", "hub", "--install", "tape:x", "--plaintext"], "not an install target"),
        (["join", "hub", "--install", "safetensors:x", "--plaintext"], "P2PCAST_TOKEN"),
        (["join", "hub", "--install", "safetensors:x", "--plaintext", "--token-file", "none"], "token file none"),
        (["commit", "soon"], "BRANCH.STEP"),
        (["status", "--hub", "elsewhere"], "http://HOST:PORT"),
        (["status", "--hub", "http://127.0.0.1:1", "--state", "s"], "not both"),
    ],
)
def test_wrong_usage(p2pcast: Run, tmp_path: Path, words: list[str], said: str) -> None:
    done = p2pcast(*words, cwd=tmp_path, env={"P2PCAST_TOKEN": ""})
    explained(done, USAGE, said)
    assert sorted(tmp_path.iterdir()) == []


def test_join_without_a_target(p2pcast: Run, hub: Hub, tmp_path: Path) -> None:
    explained(p2pcast("join", hub.address, "--token-file", hub.token_file, cwd=tmp_path), USAGE, "--install")
    assert sorted(tmp_path.iterdir()) == []


def test_help_names_every_command(p2pcast: Run) -> None:
    done = p2pcast("--help")
    assert done.returncode == 0
    for command in ("seed", "join", "status", "commit", "delta", "inspect", "verify", "bench", "lab", "demo"):
        assert re.search(rf"^  {command} +\S", done.stdout, re.MULTILINE), command
    assert p2pcast("--version").stdout.startswith("p2pcast")


@pytest.mark.parametrize(
    "token", ["", "secret", "p2pc1-aaaa-bbbb", "p2pc1-!!!!-????", "p2pc2-" + "a" * 26 + "-" + "a" * 32]
)
def test_a_malformed_token(join: Run, token: str) -> None:
    reason = explained(join(token=token), USAGE, "token")
    assert not token or token not in reason


# -- reaching and being admitted


def test_an_address_without_a_listener(join: Run, bound: str) -> None:
    free = free_port()
    explained(join("--join-timeout", 0.1, address=f"127.0.0.1:{free}"), UNREACHABLE, str(free), "refused")


def test_a_name_that_does_not_exist(join: Run) -> None:
    explained(join("--join-timeout", 0.1, address="no-such-host.invalid:7077"), UNREACHABLE, "no-such-host.invalid")


def test_no_daemon_answers(p2pcast: Run, tmp_path: Path) -> None:
    explained(p2pcast("status", "--state", tmp_path), UNREACHABLE, str(tmp_path))
    explained(p2pcast("status", "--hub", "http://127.0.0.1:1"), UNREACHABLE, "http://127.0.0.1:1", "refused")
    explained(p2pcast("commit", "0.1", "--hub", "http://127.0.0.1:1"), UNREACHABLE)


def test_a_wrong_secret(join: Run, hub: Hub) -> None:
    explained(join(token=str(JoinToken(hub.token.run, bytes(20)))), REFUSED, "token")


def test_the_token_of_another_run(join: Run, hub: Hub) -> None:
    explained(join(token=str(JoinToken(bytes(16), hub.token.secret))), REFUSED, "run")


def test_another_base(join: Run, tmp_path: Path) -> None:
    checkpoint(tmp_path / "base", 10)
    explained(join("--base", tmp_path / "base"), REFUSED, "base")


def test_a_base_that_is_not_there(join: Run, tmp_path: Path) -> None:
    explained(join("--base", tmp_path / "base"), FAILED, str(tmp_path / "base"))


def test_commit_where_the_hub_decides(p2pcast: Run, hub: Hub) -> None:
    bearer = ("--bearer-file", hub.folder / "state" / "http.token")
    explained(p2pcast("commit", "0.0", "--hub", hub.http, *bearer), USAGE, "--commit manual")


# -- this machine


def test_no_checkpoints_folder(p2pcast: Run, tmp_path: Path) -> None:
    words = ["seed", tmp_path / "none", "--state", tmp_path / "state", "--shadow", tmp_path / "shadow", *HERE]
    explained(p2pcast(*words), USAGE, str(tmp_path / "none"), "there is no such folder")


def test_a_checkpoints_folder_that_is_something_else(p2pcast: Run, tmp_path: Path) -> None:
    def seed(path: Path, *words: object) -> None:
        folders = ["--state", tmp_path / "state", "--shadow", tmp_path / "shadow"]
        explained(p2pcast("seed", path, *folders, *HERE), USAGE, str(path), *map(str, words))

    (tmp_path / "file").touch()
    seed(tmp_path / "file", "this is a file")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    seed(tmp_path / "link", "link leads to", tmp_path / "gone")
    seed(checkpoint(tmp_path / "run" / "step_60"), "one checkpoint", tmp_path / "run")
    assert not (tmp_path / "state" / "run.key").exists()


def test_a_hub_without_step_folders_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folders = ["--state", tmp_path / "state", "--shadow", tmp_path / "shadow"]
    with daemon("has no folder step_{step}/ yet", "seed", tmp_path / "run", *folders, *HERE) as log:
        assert log.endswith("the first that appears\n")
    checkpoint(tmp_path / "run" / "global_step60")
    with daemon("has no folder step_{step}/ yet", "seed", tmp_path / "run", *folders, *HERE) as log:
        assert "it holds global_step60" in log


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_files_with_a_byte_order_mark(join: Run, hub: Hub, tmp_path: Path, encoding: str) -> None:
    """As Windows' editors and PowerShell write them: the peer joins, by its token and its file of options."""
    (tmp_path / "marked").write_text(str(hub.token), encoding)
    (tmp_path / "options.toml").write_text('[join]\nname = "marked"\n', encoding)
    words = ["--config", tmp_path / "options.toml", "join", hub.address, "--token-file", tmp_path / "marked"]
    folders = [
        "--state",
        tmp_path / "peer",
        "--shadow",
        tmp_path / "shadow",
        "--install",
        f"safetensors:{tmp_path}/out",
    ]
    with daemon("version 0.0", *words, *folders, *HERE) as log:
        assert "marked" in log


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_a_port_in_use(p2pcast: Run, join: Run, tmp_path: Path, bound: str, option: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    folders = ["--state", tmp_path / "hub", "--shadow", tmp_path / "hub-shadow"]
    explained(
        p2pcast("seed", tmp_path / "checkpoints", *folders, *HERE, option, bound), FAILED, bound, "in use", option
    )
    explained(join(option, bound), FAILED, bound, "in use", option)


def test_a_state_folder_in_use(p2pcast: Run, join: Run, hub: Hub, tmp_path: Path) -> None:
    words = [
        "seed",
        hub.folder / "checkpoints",
        "--state",
        hub.folder / "state",
        "--shadow",
        tmp_path / "shadow",
        *HERE,
    ]
    explained(p2pcast(*words), FAILED, str(hub.folder / "state"), "in use", "--state")
    explained(join("--state", hub.folder / "state"), FAILED, str(hub.folder / "state"), "in use")


def test_a_shadow_in_use(join: Run, hub: Hub) -> None:
    explained(join("--shadow", hub.folder / "shadow"), FAILED, str(hub.folder / "shadow"))


def test_a_state_folder_that_is_a_file(p2pcast: Run, join: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "checkpoints").mkdir()
    explained(
        p2pcast("seed", tmp_path / "checkpoints", "--state", tmp_path / "file", *HERE), FAILED, str(tmp_path / "file")
    )
    explained(join("--state", tmp_path / "file"), FAILED, str(tmp_path / "file"))


@pytest.mark.parametrize(("name", "contents"), [("hub.json", b"{"), ("run.key", b"short"), ("token.key", b"short")])
def test_a_damaged_hub(p2pcast: Run, tmp_path: Path, name: str, contents: bytes) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).write_bytes(contents)
    words = ["seed", tmp_path / "checkpoints", "--state", tmp_path / "state", "--shadow", tmp_path / "shadow", *HERE]
    explained(p2pcast(*words), FAILED, name)


def test_a_token_file_that_cannot_be_written(p2pcast: Run, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    words = ["seed", tmp_path / "checkpoints", "--state", tmp_path / "state", "--shadow", tmp_path / "shadow", *HERE]
    explained(p2pcast(*words, "--token-file", tmp_path / "none" / "token"), FAILED, str(tmp_path / "none" / "token"))


def test_folders_whose_names_are_not_utf_8(p2pcast: Run, tmp_path: Path) -> None:
    """State, token, checkpoints, install folder and command of hub and peer, with their default shadows. The output of
    commands is strict, as in most locales.
    """
    env, strict = {"LC_ALL": "C"}, {"PYTHONIOENCODING": "utf-8:strict"}
    at = tmp_path / os.fsdecode(b"run-\xff\xe9")
    at.mkdir(0o700)
    here = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    checkpoint(at / "checkpoints" / "step_0")
    token = ("--token-file", at / "token")
    targets = ("--install", f"safetensors:{at / 'out'}", "--install", f"exec:sh -c 'echo >> {at / 'ran'}'")
    seed = ("seed", at / "checkpoints", "--state", at / "hub", *token, *here, "--mirror", f"file://{at / 'mirror'}")
    try:
        with daemon("version 0.0", *seed, env=env) as log:
            where = re.search(r"listening on (\S+), status at (http://\S+)/status", log)
            assert where is not None
            join = ("join", where[1], *token, *targets, "--state", at / "peer", "--name", "p", *here)
            with daemon("exec:sh", *join, env=env) as log:
                peer = re.search(r"status at (http://\S+)/status", log)
                assert peer is not None
                for url in (where[2], peer[1]):
                    for path in ("/status", "/metrics", "/readyz"):
                        with urllib.request.urlopen(url + path, timeout=60) as answer:
                            assert answer.status == 200
                for words in (
                    ("status", "--state", at / "hub"),
                    ("status", "--state", at / "peer", "--json"),
                    ("token", "create", "--state", at / "hub"),
                    ("backup", at / "backup", "--hub", at / "hub"),
                ):
                    done = p2pcast(*words, env=strict, errors="surrogateescape")
                    assert (done.returncode, done.stderr) == (0, ""), words
                # Weights behind a command cannot be read.
                done = p2pcast("verify", "--live", "--state", at / "peer", env=strict, errors="surrogateescape")
                assert done.returncode == UNREAD, done.stderr
                name = f"safetensors:{at / 'out'}".encode(errors="backslashreplace").decode()
                with urllib.request.urlopen(where[2] + "/status", timeout=60) as answer:
                    (row,) = json.loads(answer.read())["peers"]
                assert name in [engine["name"] for engine in row["engines"]]
        for folder in ("hub", "peer"):
            done = p2pcast("check", at / folder, env=strict, errors="surrogateescape")
            assert done.returncode == 0
            assert str(at / folder) in done.stdout
        assert (at / "out" / "step_0" / "STABLE").exists()
        assert (at / "ran").exists()
    finally:
        for folder in ("hub", "peer"):
            shutil.rmtree(default_shadow(at / folder), ignore_errors=True)


PUBLISH = """
import sys, torch
from trainer_node.sdk.publisher import Publisher
with Publisher(sys.argv[1], token_file=sys.argv[2], plaintext=True) as publisher:
    publisher.publish(0, {"w": torch.zeros(1000, dtype=torch.bfloat16)}.items()).wait_durable()
"""


@pytest.mark.prove
def test_hub_peer_and_publisher_announce_compilations(tmp_path: Path) -> None:
    """Each with an empty cache. ``tests/p2pcast/codec/test_kernel_warmup.py`` is the sample."""

    def cached(name: str) -> dict[str, str]:
        return {"NUMBA_CACHE_DIR": str(tmp_path / f"cache-{name}")}

    def announced(log: str, name: str) -> None:
        before, after = (line for line in log.splitlines() if "the codec's kernels" in line)
        assert "compiling the codec's kernels for up to a minute, once for this machine" in before
        assert str(tmp_path / f"cache-{name}") in before
        assert after.endswith("the codec's kernels are compiled")

    folders = ("--state", tmp_path / "hub", "--shadow", tmp_path / "shadow", "--token-file", tmp_path / "token")
    with daemon("kernels are compiled", "seed", *folders, *HERE, env=cached("hub")) as log:
        announced(log, "hub")
        where = re.search(r"listening on (\S+), status", log)
        assert where is not None
        words = [sys.executable, "-c", PUBLISH, where[1], tmp_path / "token"]
        done = subprocess.run(words, env={**os.environ, **cached("trainer")}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        announced(done.stderr, "trainer")
        join = ("join", where[1], "--token-file", tmp_path / "token", "--install", f"safetensors:{tmp_path / 'out'}")
        own = ("--state", tmp_path / "peer", "--shadow", tmp_path / "peer-shadow")
        with daemon("version 0.0 committed", *join, *own, *HERE, env=cached("peer")) as log:
            announced(log, "peer")


def test_a_state_path_too_long_for_a_socket(join: Run, tmp_path: Path) -> None:
    explained(join("--state", tmp_path / ("long" * 30)), FAILED, "install socket", "--state")


def skipped(log: str, *words: object) -> str:
    """The one line in which a hub says why it did not publish a folder."""
    (line,) = [line for line in log.splitlines() if "skipped" in line]
    for word in words:
        assert str(word) in line
    return line


@pytest.mark.root
def test_no_room_for_a_hubs_state(hub: Hub, tmpfs: Path) -> None:
    """The hub continues: versions published before stay available."""
    words = ["seed", hub.folder / "checkpoints", "--state", tmpfs / "hub", "--shadow", tmpfs.parent / "shadow", *HERE]
    with daemon("skipped", *words) as log:
        skipped(log, tmpfs, "no space")


@pytest.mark.root
def test_no_room_for_a_hubs_shadow(hub: Hub, tmpfs: Path) -> None:
    words = ["seed", hub.folder / "checkpoints", "--state", tmpfs.parent / "state", "--shadow", tmpfs / "hub", *HERE]
    with daemon("skipped", *words) as log:
        skipped(log, tmpfs, "free")


@pytest.mark.root
@pytest.mark.parametrize("folder", ["--state", "--shadow"])
def test_a_peer_without_room_says_so_and_goes_on_once_there_is_room(
    join_words: Callable[..., list[object]], tmpfs: Path, folder: str
) -> None:
    def enlarge() -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", tmpfs], check=True)

    words = join_words(folder, tmpfs / "peer")
    with daemon("version 0.0 committed", *words, at=("make room on the disk", enlarge)) as log:
        (line,) = [line for line in log.splitlines() if "make room on the disk" in line]
        assert str(tmpfs) in line


@pytest.mark.root
def test_a_full_disk(p2pcast: Run, join: Run, tmpfs: Path) -> None:
    (tmpfs.parent / "checkpoints").mkdir()
    with (tmpfs / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, 256 << 10)
    words = ["seed", tmpfs.parent / "checkpoints", "--state", tmpfs / "hub", "--shadow", tmpfs.parent / "shadow", *HERE]
    explained(p2pcast(*words), FAILED, str(tmpfs), "no space")
    explained(join("--state", tmpfs / "peer"), FAILED, str(tmpfs), "no space")


def test_a_base_that_the_hub_is_still_to_publish(tmp_path: Path) -> None:
    """A hub admits peers before its first version is whole: a peer that brings a base waits for the version, and is not
    refused.
    """
    base = checkpoint(tmp_path / "base", 3000)
    (tmp_path / "checkpoints").mkdir()
    hub_words = [
        "--state",
        tmp_path / "hub",
        "--shadow",
        tmp_path / "hub-shadow",
        "--token-file",
        tmp_path / "token",
        *HERE,
    ]
    with daemon("join with", "seed", tmp_path / "checkpoints", *hub_words) as log:
        where = re.search(r"listening on (\S+),", log)
        assert where is not None
        words = [
            "--state",
            tmp_path / "peer",
            "--shadow",
            tmp_path / "peer-shadow",
            "--token-file",
            tmp_path / "token",
            *HERE,
        ]
        words += ["--base", base, "--install", f"safetensors:{tmp_path / 'out'}"]
        published = tmp_path / "checkpoints" / "step_0"
        with daemon(
            "committed", "join", where[1], *words, at=("joined run", lambda: shutil.copytree(base, published))
        ) as peer:
            assert "nothing to download" in peer
    assert (tmp_path / "out" / "step_0" / "model.safetensors").exists()

"""From the words of ``p2pcast join`` to installers; which of them make no sense together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from p2pcast.cli.options import TOKEN_VARIABLE
from p2pcast.cli.settings import made
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_SPAN_NAME
from p2pcast.trust.join_token import JoinToken
from rollout_node.commands.join import join
from rollout_node.engine.install_target import Targets
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.installers.checkpoint_folder import FolderInstaller
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.peer_config import NO_WAIT, PeerConfig, SafePointWait, valid_target

TOKEN = str(JoinToken(bytes(16), bytes(20)))
FOLDER, SERVER = "safetensors:out", "vllm:http://127.0.0.1:8000"


def configured(*words: str) -> PeerConfig:
    """The record of a command line."""
    given = join.make_context("join", ["127.0.0.1:1", "--plaintext", *words]).params
    return made(PeerConfig, given).checked()


def of_span(targets: list[str], engine: str | None, role: str | None) -> PeerConfig:
    words = [f"--install={target}" for target in targets]
    words += [] if engine is None else ["--engine", engine]
    return configured(*words, *([] if role is None else ["--role", role]))


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.mark.parametrize("text", ["", "vllm", "vllm:", "sglang:", ":x", "tape:x", "safetensors"])
def test_invalid_targets_are_refused(text):
    with pytest.raises(UsageError, match="is not an install target"):
        valid_target(text)
    with pytest.raises(click.BadParameter, match="is not an install target") as refusal:
        configured("--install", text)
    assert "'--install'" in refusal.value.format_message()


@pytest.mark.parametrize(
    ("targets", "engine", "role"),
    [
        ([FOLDER], None, None),
        ([SERVER, SERVER], None, None),
        ([SERVER], "big", "lead"),
        ([FOLDER, SERVER], "b" * MAX_SPAN_NAME, "lead"),
        ([], "big", "member"),
        ([FOLDER, "exec:true"], "big", "member"),
    ],
)
def test_valid_combinations_of_targets_are_accepted(targets, engine, role):
    found = of_span(targets, engine, role)
    assert found.targets == tuple(targets)
    assert found.engine == (None if engine is None else (engine, role))


@pytest.mark.parametrize(
    ("targets", "engine", "role", "why"),
    [
        ([], None, None, "nothing to install into: give --install"),
        ([SERVER], "big", None, "go together"),
        ([SERVER], None, "lead", "go together"),
        ([], None, "member", "go together"),
        ([], "big", "lead", "exactly one --install vllm:URL, not 0"),
        ([FOLDER], "big", "lead", "not 0"),
        ([SERVER, SERVER], "big", "lead", "not 2"),
        ([FOLDER, SERVER], "big", "member", "leave --install vllm:URL to the lead"),
        ([SERVER], "", "lead", "a name has 1 to"),
        ([SERVER], "b" * (MAX_SPAN_NAME + 1), "lead", "a name has 1 to"),
    ],
)
def test_invalid_combinations_of_targets_are_refused(targets, engine, role, why):
    with pytest.raises(UsageError, match=why):
        of_span(targets, engine, role)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--engine", "big", "--role", "lead"], "exactly one --install vllm:URL"),
        (["--engine", "big", "--install", FOLDER], "go together"),
        (["--engine", "big", "--role", "captain"], "captain"),
        ([], "--install"),
    ],
)
def test_the_command_says_so(p2pcast, words, why):
    done = p2pcast("join", "127.0.0.1:1", "--plaintext", *words)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr


async def test_a_lead_leads_its_server_and_nothing_else(tmp_path: Path):
    provider: Any = None
    socket = InstallSocket(tmp_path / "s", provider)
    targets = Targets(configured("--install", SERVER), lambda version: {}, socket)
    lead = MultiHostLeader("big", socket, lambda: None)
    assert isinstance(targets.installer(SERVER), EngineInstaller)
    assert isinstance(targets.led(SERVER, lead), MultiHostInstaller)
    sglang = targets.installer("sglang:http://127.0.0.1:30000")
    assert isinstance(sglang, EngineInstaller)
    assert sglang.name == "sglang:http://127.0.0.1:30000"
    assert isinstance(targets.led(f"safetensors:{tmp_path}", lead), FolderInstaller)


def test_a_drain_contradicts_kept_caches_and_foreign_pauses() -> None:
    given, drain = ("--install", SERVER), ("--commit-safe-point", "drain")
    assert configured(*given, *drain, "--drain-timeout", "5").wait == SafePointWait("drain", 5.0)
    assert configured(*given, "--kv", "keep", "--driver", "external").wait == NO_WAIT
    for kv in ("keep", "salt"):
        with pytest.raises(UsageError, match="needs --kv recompute"):
            configured(*given, *drain, "--kv", kv)
    with pytest.raises(UsageError, match="mode=wait"):
        configured(*given, *drain, "--driver", "external")


def test_a_peer_needs_a_hub_or_a_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P2PCAST_TOKEN", raising=False)
    with pytest.raises(UsageError, match="no hub to join"):
        made(PeerConfig, join.make_context("join", ["--install", SERVER]).params)


def test_a_name_that_looks_like_an_id_is_refused_with_its_option() -> None:
    with pytest.raises(click.BadParameter, match="looks like a node's id") as refusal:
        configured("--install", SERVER, "--name", "0123456789")
    assert "'--name'" in refusal.value.format_message()

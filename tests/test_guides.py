"""Commands, settings and figures on README and pages are those of the code: a renamed option makes a page wrong."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from p2pcast.cli import cli
from p2pcast.cli.learn import read
from trainer_node.learning.learner_config import TABLES
from trainer_node.learning.monitoring.run_record import Evaluation, Probe, Publication, StepEvent
from trainer_node.learning.monitoring.run_table import COLUMNS
from trainer_node.learning.objective.token_statistics import TokenStatistics

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n|^\n)+", re.MULTILINE)
COMMAND = re.compile(r"(?:^|[ '\"])p2pcast(?:\.cli)? (.*)")
ENDS = {"&", "&&", "|", ";", ">", "2>", "<"}
LEFT_OUT = "…"


def commands(text: str) -> list[list[str]]:
    """The words after ``p2pcast`` of each command in a page's blocks."""
    fenced = [block for language, block in FENCED.findall(text) if language in ("", "sh", "yaml")]
    indented = [block for block in INDENTED.findall(FENCED.sub("", text)) if block.strip()]
    found = []
    for line in "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines():
        if match := COMMAND.search(line):
            words = shlex.split(match[1].rstrip("'\""), comments=True)
            end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
            found.append(words[:end])
    return found


def fault(words: list[str]) -> str | None:
    """Why the command is none; None if the command exists with all the options."""
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


def test_the_pages_commands_exist() -> None:
    pages = {path.name: commands(path.read_text()) for path in PAGES}
    assert len(pages["first-run.md"]) >= 5
    assert len(pages["many-machines.md"]) >= 10
    faults = [
        f"{name}: p2pcast {' '.join(words)}: {why}"
        for name, found in pages.items()
        for words in found
        if (why := fault(words)) is not None
    ]
    assert faults == []


@pytest.mark.parametrize("line", ["lern run.toml", "learn run.toml --plots", "token make", "fleet plan --rollout 3"])
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = commands(f"Text:\n\n    p2pcast {line} 2> log &\n")
    assert fault(words) is not None


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

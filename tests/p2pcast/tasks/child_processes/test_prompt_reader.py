"""Prompts read in a process that can be killed, whatever ``jobs`` does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from itertools import islice
from pathlib import Path

import hostile_prompts
import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.tasks.child_processes import prompt_child
from p2pcast.tasks.child_processes.prompt_reader import (
    FaultyPromptError,
    PromptReader,
    PromptsFailedError,
    first_prompts,
)
from p2pcast.tasks.task import FaultyPrompt, Prompt, evaluation_jobs_of
from p2pcast.tasks.task_loader import load_task
from tests.support.process_ends import wait_for_end, written_pid

FOLDER = Path(__file__).parents[1]
COUNTED = [Prompt(f"7+{number}".encode(), 4, f"row {number}") for number in range(40)]
Make = Callable[..., PromptReader]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Make]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    made: list[PromptReader] = []

    def reader(name: str, **more: object) -> PromptReader:
        name = f"hostile_prompts:{name}"
        made.append(PromptReader(name, load_task(name).hash, 7, **more))  # type: ignore[arg-type]
        return made[-1]

    yield reader
    for one in made:
        await one.close()


async def test_prompts_come_in_order_and_once_until_the_end(make: Make) -> None:
    reader = make("Counted")
    found: list[object] = []
    ended = False
    while not ended:
        rows, ended = await reader.read(len(found), 7)
        found += rows
    assert found == COUNTED
    assert [one.row for one in found if isinstance(one, Prompt)] == [one.row for one in COUNTED]


async def test_a_new_process_passes_over_the_prompts_before_the_first(make: Make) -> None:
    reader = make("Counted")
    assert await reader.read(33, 4) == (COUNTED[33:37], False)
    await reader.close()
    assert await reader.read(37, 2) == (COUNTED[37:39], False)
    assert await reader.read(5, 2) == (COUNTED[5:7], False), "an earlier prompt begins again"


async def test_a_row_that_is_no_prompt_is_named(make: Make) -> None:
    rows, ended = await make("Poisoned").read(0, 9)
    assert ended
    assert [isinstance(row, Prompt) for row in rows] == [True, False, False, False, True]
    assert rows[1:4] == [
        FaultyPrompt("prompt 1", "not a Prompt, but of type dict: {'prompt': '1+2'}"),
        FaultyPrompt("prompt 2 (data.jsonl, row 3)", "its max_tokens is 0, not an int from 1 to 1048576"),
        FaultyPrompt("prompt 3", "its prompt is of type str, not bytes"),
    ]


def line_of(text: str) -> int:
    source = Path(hostile_prompts.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(source, 1) if line.strip() == text)


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        (
            "Raising",
            PromptsFailedError,
            r"jobs\(7\) of task hostile_prompts:Raising: prompt 40: JSONDecodeError: .*"
            rf" \(hostile_prompts.py, line {line_of(hostile_prompts.RAISES)}\)$",
        ),
        ("RaisesAtOnce", PromptsFailedError, r"prompt 0: LookupError: no data \(.*hostile_prompts.py, line \d+\)$"),
        ("Unsendable", PromptsFailedError, r"prompt 1: ValueError: \? \(hostile_prompts.py, line \d+\)$"),
        ("Missing", PromptsFailedError, r"prompt 0: problems.jsonl, line 7 is no JSON$"),
        ("Refusing", UsageError, r"^the task holds all problems out$"),
        ("Exiting", PromptsFailedError, r"prompt 1: SystemExit: 3 \(.*hostile_prompts.py, line \d+\)$"),
        ("Crashing", PromptsFailedError, r"process died or answered nonsense \(IncompleteReadError\)$"),
        ("Nothing", PromptsFailedError, r"prompt 0: TypeError: jobs\(7\) gave an object of type int, no iterator"),
    ],
)
async def test_an_error_of_jobs_is_named_with_file_and_line(
    make: Make, name: str, error: type[Exception], why: str
) -> None:
    reader = make(name)
    sound = {"Raising": 40, "Unsendable": 1, "Exiting": 1, "Crashing": 1}.get(name, 0)
    read = 0
    while read < sound:
        read += len((await reader.read(read, 100)).rows)
    assert read == sound
    for _ in range(2):
        with pytest.raises(error, match=why):
            await reader.read(read, 100)


async def test_a_process_that_hangs_is_ended_with_its_children_and_the_next_goes_on(make: Make, tmp_path: Path) -> None:
    reader = make("Hanging", limit_s=0.5)
    found: list[object] = []
    while len(found) < 40:
        found += (await reader.read(len(found), 30)).rows
    assert found == COUNTED
    while (child := written_pid(tmp_path / "hung")) is None:
        with pytest.raises(PromptsFailedError, match=r"^prompt 40 of jobs\(7\) of .*Hanging has not come for 0.5 s"):
            await reader.read(40, 4)
    await asyncio.to_thread(wait_for_end, child)
    (tmp_path / "go").touch()
    for number in (40, 41):
        assert (await reader.read(number, 1)).rows == [Prompt(f"8+{number - 40}".encode(), 4)]


async def test_a_hang_is_seen_before_its_end(make: Make, tmp_path: Path) -> None:
    reader = make("Hanging", limit_s=600.0)
    assert reader.waits_s == 0.0
    await reader.read(0, 40)
    os.mkfifo(tmp_path / "hung")
    reading = asyncio.create_task(reader.read(40, 1))
    child = int(await asyncio.to_thread((tmp_path / "hung").read_text))
    assert reader.waits_s > 0.0
    assert reader.waits_for == "prompt 40 of jobs(7) of task hostile_prompts:Hanging"
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.to_thread(wait_for_end, child)
    assert reader.waits_s == 0.0


async def test_slow_prompts_are_no_hang(make: Make) -> None:
    """The limit is for one prompt, also for those that are passed over."""
    reader = make("Counted,slow_s=0.1", limit_s=2.0)
    assert (await reader.read(38, 2)).rows == COUNTED[38:]


async def test_large_prompts_come_in_parts(make: Make) -> None:
    reader, sizes = make("Large"), []
    number, ended = 0, False
    while not ended:
        rows, ended = await reader.read(number, 32)
        sizes.append(len(rows))
        for row in rows:
            assert isinstance(row, Prompt)
            assert row.prompt[:1] == bytes([number])
            number += 1
    assert number == 12
    assert max(sizes) == 1


async def test_a_task_that_has_changed_is_refused(make: Make) -> None:
    reader = PromptReader("hostile_prompts:Counted", bytes(32), 7)
    with pytest.raises(PromptsFailedError, match="changed on disk"):
        await reader.read(0, 1)


def test_a_program_without_an_event_loop_reads_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    name = "hostile_prompts:HeldOut"
    task = load_task(name)
    assert first_prompts(name, task, 7, 40, held_out=True) == list(islice(evaluation_jobs_of(task, 7), 40))
    assert first_prompts(name, task, 7, 40) == list(islice(task.jobs(7), 40))
    counted, poisoned = "hostile_prompts:Counted", "hostile_prompts:Poisoned"
    with pytest.raises(UsageError, match="holds no problems out"):
        first_prompts(counted, load_task(counted), 7, 1, held_out=True)
    assert first_prompts(counted, load_task(counted), 7, 100) == COUNTED
    with pytest.raises(FaultyPromptError, match="prompt 1 of task sums: not a Prompt, but of type dict"):
        first_prompts(poisoned, load_task(poisoned), 7, 2)


def test_the_child_tells_of_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_child, "PART_S", -1.0)
    prompts = prompt_child.SeededPrompts(hostile_prompts.Counted(), 7, held_out=False)
    answers = list(prompts.answers(3, 5))
    assert answers == [["at", 1], ["at", 2], ["at", 3], ["rows", [[True, b"7+3", 4, "row 3"]]]]

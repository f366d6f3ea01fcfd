from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_sampler import ScriptedSampler, jobs_of

from p2pcast.ground.errors import UsageError
from p2pcast.tasks import play
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task_hash import _without_texts, code_hash
from p2pcast.tasks.task_loader import BUILT_IN, GROUP, load_task, missing_settings

TASK = """
from p2pcast.tasks.sums import Sums

class Mine(Sums):
    name = "mine"

class Broken:
    name = "broken"

class Raises:
    def __init__(self):
        raise ValueError("no")

class Short(Sums):
    hash = b"short"

class Set(Sums):
    def __init__(self, must: str, *, rate: float = 0.5, fast: bool = False):
        super().__init__()
        self.given = (must, rate, fast)
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_task", raising=False)
    return tmp_path


def test_a_built_in_task_loads_by_its_name() -> None:
    assert isinstance(load_task("sums"), Sums)


def test_the_package_declares_the_built_in_tasks_as_entry_points() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert points == BUILT_IN


def test_a_users_class_loads_by_module_and_name(folder: Path) -> None:
    task = load_task("my_task:Mine", folder)
    assert task.name == "mine"
    assert task.hash != Sums().hash


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "give one of holdem, leduc, math, recite, sums, verifiers"),
        ("no_such_module:Task", "cannot import"),
        ("my_task:Missing", "no class 'Missing'"),
        ("my_task:TASK", "no class"),
        ("my_task:Broken", "it has no 'hash'"),
        ("my_task:Raises", "cannot be made: ValueError"),
        ("my_task:Short", "not 32 bytes"),
        ("my_task:Set", "needs the setting must: write my_task:Set,must=VALUE"),
        ("my_task:Set,must=a,other=1", "no setting 'other': must, rate, fast"),
        ("my_task:Set,must=a,rate=quick", "is no number"),
        ("my_task:Set,must=a,fast=1", "write yes or no"),
        ("my_task:Set,must=a,must=b", "each key once"),
        ("my_task:Set,must", "'must' is no setting"),
        ("sums,digits=two", "digits=two of task sums is no whole number"),
        ("sums,held_out=60", "held_out=60 of task sums: give 0 to 50 percent"),
        ("leduc,held_out=-1", "held_out=-1 of task leduc"),
        ("sums,digits=0", "digits=0 of task sums: give 1 to 18"),
        ("netem.rollouts.long_answers:LongAnswers,digits=2", "this task takes none"),
    ],
)
def test_objects_that_are_no_task_are_refused_with_the_reason(folder: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load_task(name, folder)


def test_settings_reach_the_class_with_their_types(folder: Path) -> None:
    assert load_task("sums,digits=3").hash == Sums(3).hash
    assert load_task("my_task:Set,must=a=b,rate=2,fast=yes", folder).given == ("a=b", 2.0, True)  # type: ignore[attr-defined]
    assert missing_settings("my_task:Set,rate=1", folder) == ["must"]
    assert missing_settings("my_task:Set,must=", folder) == []


def test_the_hash_covers_the_modules_that_a_task_names() -> None:
    assert code_hash(Sums, {}, ["p2pcast.tasks.play"]) != code_hash(Sums, {})


def test_the_hash_changes_with_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import linecache

    first = load_task("my_task:Mine", folder)
    assert code_hash(type(first), {}) == code_hash(type(first), {})
    assert code_hash(type(first), {}) != code_hash(type(first), {"a": 1})

    def hash_of(source: str) -> bytes:
        (folder / "my_task.py").write_text(source)
        linecache.clearcache()
        importlib.invalidate_caches()
        monkeypatch.delitem(__import__("sys").modules, "my_task")
        return load_task("my_task:Mine", folder).hash

    assert hash_of(f"{TASK}# changed\n") != first.hash
    assert hash_of(f'"""A prompt."""\n{TASK}') != hash_of(f'"""Another prompt."""\n{TASK}')


def test_texts_of_p2pcasts_own_modules_are_not_part_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    source, before = inspect.getsource(play), code_hash(Sums, {}, [play.__name__])
    for added, same in (("# A comment.", True), ("ADDED = 1", False)):
        read = {play: f"{added}\n{source}"}
        with monkeypatch.context() as patched:
            patched.setattr(
                inspect, "getsource", lambda code, real=inspect.getsource, r=read: r.get(code) or real(code)
            )
            assert (code_hash(Sums, {}, [play.__name__]) == before) is same


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ('"""Ä."""; x = 1  # y', "; x = 1"),
        ("def f():\n    'one'\n    # two\n    return '#'", "def f():\n    return '#'"),
        ('class A:\n    """Lines\n    of it.\n    """  # and this\n    x = "ä"  # ä', 'class A:\n    x = "ä"'),
        ('async def f(): "text"\n"kept"', 'async def f():\n"kept"'),
        ('x = """\n# kept \n\n"""', 'x = """\n# kept \n\n"""'),
    ],
)
def test_docstrings_and_comments_are_left_out(source: str, left: str) -> None:
    assert _without_texts(source) == left


GUIDE = ROOT / "docs" / "guides" / "own-task.md"


def guides_code(beginning: str) -> str:
    """The block of Python that holds ``beginning``."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if beginning in block]
    return str(found)


async def test_the_guides_task_loads_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reverse.py").write_text(guides_code("class Reverse"))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("reverse:Reverse,length=2", tmp_path)
    assert task.hash != load_task("reverse:Reverse", tmp_path).hash
    (job,) = jobs_of(task, 1)
    digits = [3 + int(digit) for digit in job.prompt.decode()]
    assert len(set(digits)) == 2  # otherwise the wrong answer below is right
    for answer, reward in (([*reversed(digits), 2], 1.0), ([*digits, 2], 1 / 3), ([digits[1], 2], 1 / 3)):
        played = await task.play(ScriptedSampler([answer]), job)
        assert task.reward(job, played.token_ids, played.mask) == pytest.approx(reward)


async def test_the_guides_task_in_text_loads_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capitals.py").write_text(guides_code("class Capitals"))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("capitals:Capitals,tokenizer=bytes", tmp_path)
    (job,) = jobs_of(task, 1)
    for answer, reward in (("Paris", 1.0), ("Rome", 0.0)):
        played = await task.play(ScriptedSampler([[*answer.encode(), *task.stop_token_ids]]), job)
        assert task.reward(job, played.token_ids, played.mask) == reward


def test_the_guides_loss_mask_keeps_the_last_turn() -> None:
    space: dict[str, Any] = {"np": np}
    exec(textwrap.dedent(guides_code("def loss_mask")), space)
    mask = np.array([0, 1, 1, 0, 0, 1, 1], "u1")
    kept = space["loss_mask"](None, None, None, mask)
    assert kept.dtype == mask.dtype
    assert kept.tolist() == [0, 0, 0, 0, 0, 1, 1]

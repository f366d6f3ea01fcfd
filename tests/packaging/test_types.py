"""A user's program, checked with mypy beside the installed wheel, sees the types of the Python interface."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from built_wheel import DEADLINE_S, clean

TYPED = ("p2pcast", "rollout_node", "topology", "trainer_node")
PROGRAM = """
from p2pcast import Reader
from p2pcast.tasks.task import Prompt
from trainer_node import Handle, Publisher
from p2pcast.ledger_api.batch_client import BatchClient


def train(publisher: Publisher, reader: Reader, client: BatchClient) -> None:
    reveal_type(publisher.publish(1, []))
    reveal_type(publisher.newest)
    reveal_type(publisher.publish(2, []).wait_live(fraction=1.0))
    reveal_type(client.take(3))
    reveal_type(Prompt(b"?", max_tokens=8).max_tokens)
    publisher.publish("three", [])
    publisher.publish(step=4)
"""
SEEN = (
    'Revealed type is "trainer_node.sdk.publication_handle.Handle"',
    'p2pcast.ground.version.Version] | None"',
    'Revealed type is "dict[str, ',
    'Revealed type is "p2pcast.ledger_api.batch_client.RolloutBatch | None"',
    'Revealed type is "int"',
    'has incompatible type "str"; expected "int"',
    'Missing positional argument "named_tensors"',
)


def test_the_wheel_marks_its_packages_as_typed(wheel: Path) -> None:
    assert {f"{name}/py.typed" for name in TYPED} <= set(zipfile.ZipFile(wheel).namelist())


def test_a_program_sees_the_types_of_the_wheel(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "program.py"]
    done = subprocess.run(mypy, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=DEADLINE_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    assert len(lines) == len(SEEN), done.stdout
    for line, words in zip(lines, SEEN, strict=True):
        assert words in line, done.stdout

"""The course of demos and of `bench live`: a work folder, the processes, the script, its verdict, and a result file."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from netem.demo.verdict import DemoCheck
from netem.fleet.participants import Programs
from netem.fleet.processes import ChildProcess, FleetError, Processes
from netem.fleet.wait import FleetWatch, unwrapped
from netem.fleet.workspace import Workspace
from p2pcast.files.atomic_files import atomic_write


class Script(Protocol):
    async def run(self) -> list[DemoCheck]:
        """Run all phases up to the verdict. Raises FleetError."""


S = TypeVar("S", bound=Script)


def played(
    folder: Path,
    make: Callable[[Workspace, Processes], S],
    document: Callable[[S, list[DemoCheck]], dict[str, Any]],
    *,
    keep: bool,
    display: AbstractContextManager[object] | None = None,
) -> dict[str, Any]:
    """Run a script. Returns its document, which is written to the folder too; ``verdict`` is FAIL or begins with PASS.
    After a PASS, logs and result remain, and all files with ``keep``. Raises UsageError, FleetError.
    """
    with Workspace(folder) as work, Processes(work.logs) as processes:
        script = make(work, processes)
        with display or contextlib.nullcontext():
            checks = asyncio.run(unwrapped(script.run()))
        result = document(script, checks)
        atomic_write(work.root / "result.json", json.dumps(result, indent=1).encode(), None)
        if result["verdict"] != "FAIL" and not keep:
            processes.stop_all()
            work.slim()
        return result


def need_vllm(why: str) -> None:
    """Raises FleetError that says ``why`` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise FleetError(why)


async def fresh_answers(
    parts: Programs, watch: FleetWatch, child: ChildProcess, steps: Iterable[int], limit_s: float
) -> dict[int, Any]:
    """Answers of the newly started engines of ``child``, by step. Raises FleetError."""
    await watch.end("new engines", child, limit_s)
    return dict(zip(steps, json.loads(parts.fresh_output.read_text().splitlines()[-1]), strict=True))


def vllm_engine(peers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The vLLM engine by the status of its peer, or of the hub's peers; empty without an engine."""
    engines = (engine for peer in peers for engine in peer.get("engines") or [])
    return next((dict(engine) for engine in engines if engine["name"].startswith("vllm:")), {})


class JsonLines:
    """A growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def news(self) -> list[dict[str, Any]]:
        """The whole lines since the last call; none before the file exists."""
        if not self._path.exists():
            return []
        whole, _, _ = self._path.read_text().rpartition("\n")
        lines = whole.splitlines()[self._read :]
        self._read += len(lines)
        return [json.loads(line) for line in lines]

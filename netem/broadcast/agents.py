"""Rival processes, one a host: started, controlled with lines of JSON, ended with the block or with this process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from netem.emulation.description import Emulated
from p2pcast.ground.errors import LocalError

ANSWER_S = 150.0
"""Far longer than the slowest rival's broadcast."""
END_S = 5.0
MODULE = "netem.broadcast.contenders"


class Agent:
    """Raises LocalError if the process ends early or does not answer in time."""

    def __init__(self, net: Emulated, host: str, role: str, settings: Mapping[str, Any], module: str = MODULE) -> None:
        self.host = host
        prefix = [sys.executable, "-P", "-m", "netem.fleet.die_with_parent", str(os.getpid()), "0"]
        words = [*prefix, *net.inside(host), sys.executable, "-P", "-m", module, role, json.dumps(settings)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"p2pcast-{role}-{host}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("ended early") from None

    def answer(self, key: str) -> Any:
        """The next answer, which must have ``key``."""
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except queue.Empty:
            raise self._failure(f"said nothing for {ANSWER_S:.0f} s") from None
        if not line:
            raise self._failure("ended early")
        return json.loads(line)[key]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(END_S)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # the process died before it read an order

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _failure(self, what: str) -> LocalError:
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip().splitlines()[-5:]
        return LocalError(f"{self._process.args[-2]!s} at {self.host} {what}: {' / '.join(tail) or 'no reason given'}")  # type: ignore[index]


class Agents:
    """All processes of one rival, by host; ends them with the block."""

    def __init__(self, net: Emulated, module: str = MODULE) -> None:
        self._net = net
        self._module = module
        self.agents: dict[str, Agent] = {}

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            agent.close()

    def start(self, host: str, role: str, settings: Mapping[str, Any]) -> None:
        self.agents[host] = Agent(self._net, host, role, settings, self._module)

    def send_order(self, **order: Any) -> None:
        for agent in self.agents.values():
            agent.send_order(**order)

    def answers(self, key: str) -> dict[str, Any]:
        return {host: agent.answer(key) for host, agent in self.agents.items()}

    @property
    def pids(self) -> dict[str, int]:
        return {host: agent.pid for host, agent in self.agents.items()}

"""How the weights of an RL run reach its engines: by p2pcast's peers, or by a star that sends every version whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Protocol

from netem.broadcast.rivals import needed
from netem.emulation.description import HUB, Emulated
from netem.fleet.fleet import HTTP_PORT, Fleet
from netem.fleet.rollout_processes import Tables
from netem.rl_lab.dense_star import INSTALLED, PORT

ENGINE_PORT: Final = 8000
ENGINE_URL: Final = f"http://127.0.0.1:{ENGINE_PORT}"
INSTALL: Final = f"""\
exec curl -sfS -X POST -G --data-urlencode "version=$P2PCAST_VERSION" --data-urlencode "folder=$P2PCAST_DIR" \\
  {ENGINE_URL}/install
"""


class WeightPath(Protocol):
    """``tables``: for the learner's configuration. ``begin``: beside the hub; ``join``: beside an engine, with a
    server of ``/versions`` at HTTP_PORT. ``installs``: version → Unix time at which that host's engine served it.
    ``sizes``: version → bytes.
    """

    @property
    def tables(self) -> Tables: ...
    def begin(self) -> None: ...
    def join(self, host: str, region: str) -> None: ...
    def installs(self, host: str) -> dict[str, float]: ...
    def sizes(self) -> dict[str, int]: ...


class PeerPath:
    """p2pcast: a peer beside each engine, with ``--install exec:``."""

    tables: Tables = {}  # noqa: RUF012

    def __init__(self, run: Fleet, base: Path) -> None:
        needed(command="curl")
        self._run, self._base = run, base

    def begin(self) -> None: ...

    def join(self, host: str, region: str) -> None:
        script = self._run.folder / "install.sh"
        script.write_text(INSTALL)
        words: list[str | Path] = ["join", self._run.place.hub, "--name", host, "--region", region]
        words += ["--token-file", self._run.token, "--base", self._base, "--install", f"exec:sh {script}"]
        self._run.node(host, *words)

    def installs(self, host: str) -> dict[str, float]:
        events = self._run.events[host].reported
        return {one.facts["version"]: one.time_s for one in reversed(events) if one.kind == "committed"}

    def sizes(self) -> dict[str, int]:
        events = self._run.events[HUB].reported
        return {one.facts["version"]: int(one.facts["bytes"]) for one in events if one.kind == "sealed"}


class StarPath:
    """The rival: see ``netem.rl_lab.dense_star``."""

    def __init__(self, net: Emulated, run: Fleet, base: Path) -> None:
        self._net, self._run, self._base = net, run, base
        self._exports = run.folder / "exports"
        self._joined: list[str] = []

    @property
    def tables(self) -> Tables:
        return {"export": {"folder": self._exports, "every": 1, "keep": 3}}

    def begin(self) -> None:
        words: list[str | Path] = ["serve", str(PORT), f"http://127.0.0.1:{HTTP_PORT}", self._exports]
        self._run.processes.fork("star", words, self._net.space(HUB), entry="netem.rl_lab.dense_star")

    def join(self, host: str, region: str) -> None:
        server = f"http://{self._net.network.address(HUB)}:{PORT}"
        words: list[str | Path] = ["fetch", server, ENGINE_URL, str(HTTP_PORT), self._folder(host), self._base]
        self._run.processes.fork(f"star-{host}", words, self._net.space(host), entry="netem.rl_lab.dense_star")
        self._joined.append(host)

    def installs(self, host: str) -> dict[str, float]:
        return {one["version"]: one["time"] for one in self._lines(host)}

    def sizes(self) -> dict[str, int]:
        return {one["version"]: one["bytes"] for host in self._joined for one in self._lines(host) if one["bytes"]}

    def _folder(self, host: str) -> Path:
        return self._run.folder / "star" / host

    def _lines(self, host: str) -> list[dict[str, Any]]:
        try:
            lines = (self._folder(host) / INSTALLED).read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

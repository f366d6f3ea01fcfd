"""A real Prometheus in a process of its own, with the alerts of ``deploy``, and its API."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.deploy.deploy_files import ALERTS
from tests.support.until import check_runs, until

JOB = "p2pcast"
SCRAPE_S = 1
DEADLINE_S = 600.0
ADDRESS = re.compile(r'msg="Listening on" address=(\S+)')


class Prometheus:
    """``folder``: of its configuration, its data and its log."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        self.targets: list[str] = []

    def scrape(self, *targets: tuple[str, int]) -> None:
        """Scrape these HTTP addresses too. Prometheus reads the file of targets again when the file changes."""
        self.targets += [f"{host}:{port}" for host, port in targets]
        part = self._folder / "targets.part"
        part.write_text(yaml.safe_dump([{"targets": self.targets}]))
        part.rename(self._folder / "targets.yml")

    async def start(self) -> None:
        """Start the process. Returns once the process listens."""
        shutil.copy(ALERTS, self._folder)
        interval = f"{SCRAPE_S}s"
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": [ALERTS.name],
            "scrape_configs": [{"job_name": JOB, "file_sd_configs": [{"files": ["targets.yml"]}]}],
        }
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (self._folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                "prometheus",
                "--web.listen-address=127.0.0.1:0",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                stderr=log,
            )
        process = self._process
        found = await until(lambda: ADDRESS.search(self._log()), self._log, check=lambda: check_runs(process))
        self._url = f"http://{found[1]}"

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            async with asyncio.timeout(DEADLINE_S):
                await self._process.wait()

    def _log(self) -> str:
        return (self._folder / "log").read_text()

    async def _get(self, path: str, **asked: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as http, http.get(self._url + path, params=asked) as answer:
            text = await answer.text()
            return answer.status, await answer.json() if answer.content_type == "application/json" else text

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        status, answer = await self._get("/api/v1/query", query=expr)
        assert status == 200, (expr, answer)
        assert answer["data"]["resultType"] == "vector", expr
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def label_values(self, selector: str, label: str) -> list[str]:
        status, answer = await self._get(f"/api/v1/label/{label}/values", **{"match[]": selector})
        assert status == 200, answer
        found: list[str] = answer["data"]
        return found

    async def rules(self) -> list[dict[str, Any]]:
        """The alerts with their state."""
        _, answer = await self._get("/api/v1/rules")
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]

    async def _scrapes(self) -> Mapping[str, int]:
        """Target → number of its scrapes that succeeded. Empty while the server starts."""
        status, answer = await self._get("/api/v1/query", query="sum_over_time(up[1h])")
        found = answer["data"]["result"] if status == 200 else []
        return {row["metric"]["instance"]: int(float(row["value"][1])) for row in found}

    async def scraped(self, count: int) -> None:
        """Wait until each target was scraped ``count`` more times, and each alert was evaluated after that."""
        before = await self._scrapes()
        await until(
            self._scrapes,
            holds=lambda now: all(now.get(name, 0) - before.get(name, 0) >= count for name in self.targets),
        )
        old = await self.rules()
        await until(
            self.rules,
            holds=lambda new: (
                new and all(a["lastEvaluation"] != b["lastEvaluation"] for a, b in zip(old, new, strict=True))
            ),
        )

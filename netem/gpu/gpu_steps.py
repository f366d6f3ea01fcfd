"""The steps, each a command in a process of its own. Pure: commands are returned and not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CORE = ("blake3", "click", "cryptography", "msgpack", "numba", "numpy", "rich", "safetensors", "torch", "zstandard")
"""Packages of every step."""
DAEMONS = (*CORE, "aiohttp", "prometheus_client", "sqlalchemy", "uvloop")
"""Packages of steps that start a hub or a peer."""
TESTED = ("tests/p2pcast/device", "tests/rollout_node/in_engine", "tests/trainer_node/sdk")
"""Folders with tests marked ``device`` that need no engine and no learner."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """``state_bytes``: of the state. ``versions``: installed by one step. ``device``: torch's name of it."""

    state_bytes: int
    versions: int
    device: str

    @property
    def mib(self) -> str:
        return str(max(1, self.state_bytes // MIB))


@dataclass(frozen=True, slots=True)
class Step:
    """``arguments``: Python's. ``needs``: modules. ``json``: the output's last line is a JSON document. ``keys``: of
    that document, those that are kept; all if empty. ``only_cuda``: the step differs from another on a GPU alone.
    ``limit_s``: time limit in seconds.
    """

    shows: str
    needs: tuple[str, ...]
    arguments: Callable[[Sizes], tuple[str, ...]]
    json: bool = True
    keys: tuple[str, ...] = ()
    only_cuda: bool = False
    limit_s: float = 600.0


def bench(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", "p2pcast.cli", "bench", name, *options, "--json")


def publish(sizes: Sizes, previous: str) -> tuple[str, ...]:
    return bench("publish", "--mib", sizes.mib, "--steps", "5", "--device", sizes.device, "--previous", previous)


STEPS: dict[str, Step] = {
    "passes": Step(
        "dense passes beside a copy in the device's memory",
        CORE,
        lambda sizes: bench("device", "--mib", sizes.mib, "--device", sizes.device),
    ),
    "install": Step(
        "versions into a torch model on the device, compared bit for bit",
        CORE,
        lambda sizes: (
            *("-m", "netem.gpu.module_install", "--mib", sizes.mib),
            *("--versions", str(sizes.versions), "--device", sizes.device),
        ),
    ),
    "publish": Step(
        "`Publisher` of live tensors; its two states on the device",
        DAEMONS,
        lambda sizes: publish(sizes, "gpu"),
    ),
    "publish-pinned": Step(
        "the same; its two states in pinned memory of the host",
        DAEMONS,
        lambda sizes: publish(sizes, "pinned"),
        only_cuda=True,
    ),
    "tests": Step(
        "tests marked `device`",
        (*DAEMONS, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
        lambda sizes: ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "device and not prove", *TESTED),
        json=False,
    ),
    "engine": Step(
        "versions into a live vLLM with its graphs, under load, beside vLLM's own reload",
        (*DAEMONS, "vllm", "transformers"),
        lambda sizes: bench("live", "--versions", str(sizes.versions), "--tp", "1", "--graphs", "--fresh-every", "5"),
        keys=("rows", "verdict"),
        limit_s=1800.0,
    ),
    "sparse": Step(
        "sparse attention in vLLM: exact with a full budget, the learner's tokens with a small one, and speed",
        (*DAEMONS, "vllm", "transformers"),
        lambda sizes: bench("sparse", "--length", "1000", "--length", "16000"),
        keys=("agreement", "rows"),
        limit_s=1800.0,
    ),
    "quantised": Step(
        "KL from sampler to learner for vLLM with each quantised form",
        (*DAEMONS, "vllm", "transformers", "compressed_tensors"),
        lambda sizes: bench("quantised", "--engines", "--versions", "1", "--lr", "1e-6"),
        keys=("engines",),
        limit_s=3600.0,
    ),
}

"""The steps, each a command in a process of its own, and the page's text of each result. Pure: commands are returned
and not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from netem.bench.figures_text import filled
from p2pcast.ground.limits import MIB

Result = dict[str, Any]

CORE = ("blake3", "click", "cryptography", "msgpack", "numba", "numpy", "rich", "safetensors", "torch", "zstandard")
"""Packages of every step."""
DAEMONS = (*CORE, "aiohttp", "msgspec", "prometheus_client", "sqlalchemy", "uvloop")
"""Packages of steps that start a hub or a peer."""
TESTED = ("tests/p2pcast/device", "tests/rollout_node/in_engine", "tests/trainer_node/sdk")
"""Folders with tests marked ``device`` that need no engine and no learner."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """``state_bytes``: of the state. ``versions``: installed by one step. ``device``: torch's name of it."""

    state_bytes: int
    versions: int
    device: str

    @property
    def mib(self) -> str:
        return str(max(1, self.state_bytes // MIB))


@dataclass(frozen=True, slots=True)
class GpuStep:
    """``arguments``: Python's. ``needs``: modules. ``text``: the page's text of a result. ``json``: the output's last
    line is a JSON document. ``keys``: of that document, those that are kept; all if empty. ``only_cuda``: the step
    differs from another on a GPU alone. ``limit_s``: time limit in seconds.
    """

    shows: str
    needs: tuple[str, ...]
    arguments: Callable[[StepSizes], tuple[str, ...]]
    text: Callable[[Result], str]
    json: bool = True
    keys: tuple[str, ...] = ()
    only_cuda: bool = False
    limit_s: float = 600.0


def bench(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", "p2pcast.cli", "bench", name, *options, "--json")


def publish(sizes: StepSizes, previous: str) -> tuple[str, ...]:
    return bench("publish", "--mib", sizes.mib, "--steps", "5", "--device", sizes.device, "--previous", previous)


def _rows(template: str, key: str = "rows") -> Callable[[Result], str]:
    """The text of each row."""
    return lambda result: "; ".join(filled(template, row) for row in result[key])


PUBLISHED = _rows(
    "{row}: snapshot {snapshot_s:ms .0f} ms ({snapshot_to_memcpy:.1f} × a copy), stored after {total_s:ms .0f} ms, "
    "{bytes:MB .1f} MB"
)
PASSES = _rows("{pass} {state_bytes_per_s:GB .1f} ({speed_to_copy:.2f})")
PAUSES = _rows("{system}: pause median {pause_median_s:ms .0f} ms, p99 {pause_p99_s:ms .0f} ms")


def _install(result: Result) -> str:
    graph = "a CUDA graph kept computing with the new weights" if result["cuda_graph"] else "no CUDA graph"
    return filled(
        "{versions} versions of {state_bytes:MiB .0f} MiB, {values} values each; pause p50 {pause_p50_s:ms .1f} ms, "
        "p99 {pause_p99_s:ms .1f} ms; prepared beside in {prepare_p50_s:ms .0f} ms; {graph}",
        {**result, "graph": graph},
    )


def _sparse(result: Result) -> str:
    speeds = ", ".join(f"{row['ratio']:.2f} at {row['length']} tokens" for row in result["rows"])
    return filled(
        "full budget: bit for bit dense; mean gap to the learner in nats: dense {dense_gap:.1e}, sparse "
        "{sparse_gap:.1e}, effect of missing pages {effect:.1e}; speed ÷ dense: {speeds}",
        {**result["agreement"], "speeds": speeds},
    )


def _engines(result: Result) -> str:
    return "; ".join(
        f"{row['engine']}: {row['error'] or format(row['kl'], '.1e') + ' nats a token'}" for row in result["engines"]
    )


STEPS: dict[str, GpuStep] = {
    "passes": GpuStep(
        "dense passes beside a copy in the device's memory",
        CORE,
        lambda sizes: bench("device", "--mib", sizes.mib, "--device", sizes.device),
        lambda result: f"GB of state a second (÷ copy): {PASSES(result)}",
    ),
    "install": GpuStep(
        "versions into a torch model on the device, compared bit for bit",
        CORE,
        lambda sizes: (
            *("-m", "netem.gpu.module_install", "--mib", sizes.mib),
            *("--versions", str(sizes.versions), "--device", sizes.device),
        ),
        _install,
    ),
    "publish": GpuStep(
        "`Publisher` of live tensors; its two states on the device",
        DAEMONS,
        lambda sizes: publish(sizes, "gpu"),
        PUBLISHED,
    ),
    "publish-pinned": GpuStep(
        "the same; its two states in pinned memory of the host",
        DAEMONS,
        lambda sizes: publish(sizes, "pinned"),
        PUBLISHED,
        only_cuda=True,
    ),
    "tests": GpuStep(
        "tests marked `device`",
        (*DAEMONS, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
        lambda sizes: ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "device and not prove", *TESTED),
        lambda result: ", ".join(f"{number} {what}" for what, number in result.items()),
        json=False,
    ),
    "engine": GpuStep(
        "versions into a live vLLM with its graphs, under load, beside vLLM's own reload",
        (*DAEMONS, "vllm", "transformers"),
        lambda sizes: bench("live", "--versions", str(sizes.versions), "--tp", "1", "--graphs", "--fresh-every", "5"),
        lambda result: f"{result['verdict']}; {PAUSES(result)}",
        keys=("rows", "verdict"),
        limit_s=1800.0,
    ),
    "sparse": GpuStep(
        "sparse attention in vLLM: exact with a full budget, the learner's tokens with a small one, and speed",
        (*DAEMONS, "vllm", "transformers"),
        lambda sizes: bench("sparse", "--length", "1000", "--length", "16000"),
        _sparse,
        keys=("agreement", "rows"),
        limit_s=1800.0,
    ),
    "quantised": GpuStep(
        "KL from sampler to learner for vLLM with each quantised form",
        (*DAEMONS, "vllm", "transformers", "compressed_tensors"),
        lambda sizes: bench("quantised", "--engines", "--versions", "1", "--lr", "1e-6"),
        _engines,
        keys=("engines",),
        limit_s=3600.0,
    ),
}

"""The demo's verdict. It uses the plain ``safetensors`` library, the trainer's own files and freshly started engines,
and no code of the judged system.

Promise: a folder passes only if it has the trainer's tensors (names, dtypes, shapes, every byte) and the trainer's
small files. An answer passes only if its tokens and the bits of its log-probabilities equal those of a new engine that
loaded the trainer's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from netem.fleet.processes import describe_exit
from netem.fleet.traffic import TrafficCounts

WEIGHTS = ".safetensors"
NOT_CONTENT = frozenset({"STABLE", "model.safetensors.index.json"})
"""A marker and an index, which may differ for the same weights."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class DemoCheck:
    name: str
    ok: bool
    detail: str

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name → (dtype, shape, bytes) of all tensors in the folder's safetensors files. Raises OSError,
    SafetensorError.
    """
    out = {}
    for path in sorted(folder.glob(f"*{WEIGHTS}")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            out[name] = (str(tensor["dtype"]), tuple(tensor["shape"]), bytes(tensor["data"]))
    return out


def small_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != WEIGHTS and path.name not in NOT_CONTENT
    }


def differences(expected: Path, found: Path) -> list[str]:
    """Differences between ``found`` and ``expected``; none for the same checkpoint."""
    if not found.is_dir():
        return [f"{found} is missing"]
    try:
        want, have = tensors(expected), tensors(found)
    except (OSError, safetensors.SafetensorError) as error:
        return [f"{found}: {error}"]
    out = []
    if not want:
        out.append(f"{expected} holds no tensors")
    for name in sorted(want.keys() | have.keys()):
        if want.get(name) != have.get(name):
            what = (
                "differs"
                if name in want and name in have
                else "is missing"
                if name in want
                else "differs from the trainer's"
            )
            out.append(f"{found}: tensor {name} {what}")
    wanted, had = small_files(expected), small_files(found)
    out += [
        f"{found}: file {name} differs"
        for name in sorted(wanted.keys() | had.keys())
        if wanted.get(name) != had.get(name)
    ]
    return out


def check_folders(
    trained: Mapping[int, Path], peers: Mapping[str, Path], due: Mapping[str, set[int]], *, first: int = 0
) -> DemoCheck:
    """Compare every folder that a peer wrote with the trainer's, and check that each version ``due`` at a
    peer exists. Folders of steps before ``first`` are left out.
    """
    faults, compared = [], 0
    for peer, folder in peers.items():
        numbers = {int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdigit()}
        written = {step for step in numbers if step >= first}
        faults += [
            f"{peer} wrote step_{step}, which the trainer did not write" for step in sorted(written - trained.keys())
        ]
        for step in sorted((written | due[peer]) & trained.keys()):
            faults += differences(trained[step], folder / f"step_{step}")
            compared += 1
    detail = f"{compared} folders of {len(peers)} peers" + ("" if not faults else "; " + "; ".join(faults[:SHOWN]))
    return DemoCheck("every peer's folders equal the trainer's, byte for byte", not faults and compared > 0, detail)


def check_answers(live: Mapping[int, Any], fresh: Mapping[int, Any]) -> DemoCheck:
    """``live`` and ``fresh``: step → answers. Answers of different versions must differ; otherwise equality would prove
    nothing.
    """
    faults = [f"version {step} has other answers" for step in live if live[step] != fresh.get(step)]
    shown = [json.dumps(fresh.get(step)) for step in live]
    if len(set(shown)) < len(shown):
        faults.append("two versions have the same answers, so these probes prove nothing")
    steps = ", ".join(map(str, live))
    detail = f"tokens and log-probabilities of versions {steps}" + ("" if not faults else "; " + "; ".join(faults))
    return DemoCheck("the live vLLM answers as a freshly started one", not faults and len(live) > 1, detail)


def check_traffic(counts: TrafficCounts) -> DemoCheck:
    detail = f"{counts.ok} answered in full, {counts.failed} failed, {counts.tokens} tokens"
    detail += "".join(f"; {error}" for error in counts.errors)
    return DemoCheck("no request failed", counts.failed == 0 and counts.ok > 0, detail)


def check_exits(who: str, exits: Mapping[str, int]) -> DemoCheck:
    """``exits``: exit code by process."""
    bad = {name: describe_exit(code) for name, code in exits.items() if code}
    detail = f"exit codes: {bad}" if bad else "exit code 0 of all processes"
    return DemoCheck(f"{who} ended in good order", not bad, detail)

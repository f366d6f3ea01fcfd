"""A run of verl's workers with weights by p2pcast, in the environment "verl": ``synced_run.py ORDERS REPORT``.

ORDERS and REPORT are files of JSON. Keys of ORDERS:

- ``model``: folder of the model. ``settings``: of the backend.
- ``peers``: a state folder for each rollout worker.
- ``managers``: "staging" or "plain", for each sync.
- ``naive``: number of syncs by verl's backend "naive".
- ``kill``: "actor", "rollout" or null.
- ``temporary``: a folder for Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import verl_workers
from verl.checkpoint_engine import CheckpointEngineManager

from p2pcast.ground.errors import P2PCastError
from trainer_node.frameworks.verl import P2PCastCheckpointEngine, StagingCheckpointEngineManager

Document = dict[str, Any]
RANKS = 2


class Run:
    """Actors, rollout workers and their managers."""

    def __init__(self, orders: Document) -> None:
        self.model = orders["model"]
        self.settings = orders["settings"]
        self.peers = orders["peers"]
        config = verl_workers.configuration(self.model, {**self.settings, "peer": "$PEER"})
        self.actors = verl_workers.actors(config, RANKS)
        pairs = [verl_workers.replica(config, rank, peer) for rank, peer in enumerate(self.peers)]
        self.rollouts = [group for group, _ in pairs]
        self.replicas = [replica for _, replica in pairs]
        engine = self.replicas[0].config.checkpoint_engine
        self.managers = {
            name: kind(config=engine, actor_wg=self.actors, replicas=self.replicas)
            for name, kind in (("staging", StagingCheckpointEngineManager), ("plain", CheckpointEngineManager))
        }

    def sync(self, step: int, manager: str) -> Document:
        """One optimiser step and one sync: digests of the weights that were sent and received, figures, times, and the
        growth of each actor's memory within the sync, in bytes.
        """
        self.actors.train(step)
        for replica in self.replicas:
            replica.calls.clear()
        before = [resident for resident, _ in self.actors.memory()]
        began = time.monotonic()
        figures = self.managers[manager].update_weights(step)
        sync_s = time.monotonic() - began
        peaks = [peak for _, peak in self.actors.memory()]
        pauses = [{name: at for name, at, _ in replica.calls} for replica in self.replicas]
        return {
            "step": step,
            "manager": manager,
            "sync_s": sync_s,
            "pause_s": max(pause["resume"] for pause in pauses) - min(pause["abort"] for pause in pauses),
            "staged_at_pause": [replica.calls[0][2] for replica in self.replicas],
            "figures": figures,
            "growth": [peak - resident for peak, resident in zip(peaks, before, strict=True)],
            "sent": self.actors.digests()[0],
            "received": self.received(),
        }

    def received(self) -> list[Any]:
        """Of each rollout worker: digests of its engine's weights, and the steps that were installed."""
        return [group.digests()[0] for group in self.rollouts]

    def naive(self, syncs: int) -> list[float]:
        """Times of verl's backend for colocated actors and engines, in the same processes."""
        self.actors.take_rollout(self.model)
        times = []
        for step in range(syncs):
            began = time.monotonic()
            ray.get(self.actors.update_weights(global_steps=step, mode="naive"))
            times.append(time.monotonic() - began)
        return times

    def killed(self, side: str, step: int) -> Document:
        """A sync in whose middle a process dies: the error, and what living rollout workers held before and after."""
        self.actors.train(step)
        sent = self.actors.digests()[0]
        living = self.rollouts if side == "actor" else self.rollouts[1:]
        before = [group.digests()[0][0] for group in living]
        for replica in self.replicas:
            replica.calls.clear()
        if side == "actor":
            self.actors.die_after(1, 3)
        else:
            self.rollouts[0].die_after(3)
        error = ""
        try:
            self.managers["staging"].update_weights(step)
        except Exception as raised:  # noqa: BLE001 - the report names every error
            error = f"{type(raised).__name__}: {raised}"
        return {
            "error": error,
            "sent": sent,
            "before": before,
            "after": [group.digests()[0][0] for group in living],
            "calls": [[name for name, _, _ in replica.calls] for replica in self.replicas],
        }

    def refusals(self, newest: str, before: str) -> dict[str, str]:
        """Errors of a rollout worker's engine at a peer whose newest version is ``newest``, after ``before``."""

        def engine(**settings: Any) -> P2PCastCheckpointEngine:
            return P2PCastCheckpointEngine(0, **{**self.settings, "peer": self.peers[0], "wait_s": 1.0, **settings})

        def error_of(call: Any) -> str:
            try:
                call()
            except P2PCastError as error:
                return str(error)
            return ""

        def receive(after: str, step: int) -> None:
            async def install() -> None:
                worker = engine()
                worker.init_process_group(after=after, reads=True)
                async for _ in worker.receive_weights(step):
                    pass
                worker.finalize()

            asyncio.run(install())

        step = int(newest.partition(".")[2])
        return {
            "none": error_of(lambda: receive(before, step)),
            "never": error_of(lambda: receive(newest, step + 1)),
            "wrong step": error_of(lambda: receive(before, step + 1)),
            "newer": error_of(lambda: engine().stage(before)),
            "no peer": error_of(lambda: engine(peer="/nowhere").init_process_group(after=None, reads=True)),
            "no variable": error_of(lambda: engine(peer="$NOT_SET/x").init_process_group(after=None, reads=True)),
            "no hub": error_of(lambda: P2PCastCheckpointEngine(0, hub="", peer="x")),
        }

    def end(self) -> None:
        for group in (self.actors, *self.rollouts):
            for worker in group.workers:
                ray.kill(worker)


def main() -> None:
    orders, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=orders["temporary"])
    run = Run(orders)
    report: Document = {}
    report["syncs"] = [run.sync(step, manager) for step, manager in enumerate(orders["managers"])]
    report["resident"] = [resident for resident, _ in run.actors.memory()]
    done = len(report["syncs"])
    if not orders["kill"]:
        newest = report["syncs"][-1]["figures"]
        report["refusals"] = run.refusals(
            *(f"{newest['p2pcast/branch']}.{newest['p2pcast/step'] - ago}" for ago in (0, 1))
        )
    if orders["naive"]:
        report["naive_s"] = run.naive(orders["naive"])
    if orders["kill"]:
        report["killed"] = run.killed(orders["kill"], done)
        run.end()
        run = Run(orders)
        report["again"] = [run.sync(step, "staging") for step in (done, done + 1)]
    out.write_text(json.dumps(report))
    ray.shutdown()
    sys.stdout.flush()
    os._exit(0)  # at an ordinary end, a thread of Ray can abort the process


if __name__ == "__main__":
    main()

"""A whole RL run over a WAN: p2pcast and a dense star, one after the other in one invocation, with one site cut off for
a while.

The processes are those of `netem.rl_lab.rl_system`. Learner, ledger and hub run at the host ``hub``; a peer, an engine
and a worker run at each other host. In place of peers, the star has `netem.rl_lab.dense_star`: each engine's host
downloads the newest checkpoint whole.

Phases of each method: ``warm_up`` learner steps that do not count; ``before_s`` seconds; a cut of the trunk of the
region ``cut`` for ``cut_s`` seconds; ``after_s`` seconds. There is a row for each phase and one for all of them.

Columns: ``tokens_per_s``, sampled tokens that the ledger accepted; ``of_before``, ÷ those before the cut. ``bubble``,
the learner's waiting time ÷ its waiting and training time (ECHO-2, section 5.1); ``wait_s``, waiting for each step.
``staleness``, trained rollouts by age in learner steps. ``version_s``, the median time from a version's opening at the
hub until every engine that can be reached serves it. ``skipped``, versions that some engine never served.
``trunk_bytes``, all bytes to a region for each version. ``caught_up_s``, from the end of the cut until
the cut engines serve a version as new as the newest at that time. ``lost``: jobs that the cut site held and that never
ended, and groups trained twice. Last rows: ``gain``, tokens/s of p2pcast ÷ those of the star, by phase.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from netem.broadcast.cpu import CpuMeter
from netem.emulation.description import HUB
from netem.emulation.namespaces import Namespaces
from netem.emulation.tables import bounded, filled, not_empty
from netem.fleet.fleet import Fleet, Hosts, folders
from netem.fleet.processes import Processes
from netem.lab.case_network import emulated
from netem.lab.network_tables import network_of
from netem.rl_lab.phase_figures import RunPhase, caught_up_s, figures
from netem.rl_lab.rl_system import MODEL_MODULES, SMALL_MODULES, RlSetup, RlSystem
from netem.rl_lab.run_observer import RunObserver
from p2pcast.ground.errors import UsageError

P2PCAST, STAR = "p2pcast", "dense star"
SYSTEMS: Final = {"p2pcast": P2PCAST, "star": STAR}
WHOLE: Final = "all"
BEFORE, CUT, AFTER = "before", "cut", "after"
STEPS_S: Final = 600.0
"""Limit for the steps that do not count."""
LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Parameters:
    """See ``RlSetup`` for the run's size. ``systems``: in this order."""

    cut: str
    systems: tuple[str, ...] = ("p2pcast", "star")
    layers: int = 4
    tokens: int = 64
    tokens_per_s: float = 16.0
    slots: int = 12
    groups: int = 6
    group_size: int = 4
    staleness: int = 1
    publish_every: int = 0
    train_s: float = 6.0
    warm_up: int = 3
    before_s: float = 60.0
    cut_s: float = 60.0
    after_s: float = 60.0

    def check(self) -> None:
        not_empty(self, "systems")
        if unknown := set(self.systems) - set(SYSTEMS):
            raise UsageError(f"parameters.systems: there is no {unknown.pop()!r}, but {', '.join(SYSTEMS)}")
        bounded(self, layers=(1, 64), tokens=(1, 448), tokens_per_s=(0.1, 1e4), slots=(1, 256), groups=(1, 1024))
        bounded(self, group_size=(2, 64), staleness=(0, 100), publish_every=(0, 101), train_s=(0, 600))
        bounded(self, warm_up=(1, 100), before_s=(1, 3600), cut_s=(1, 3600), after_s=(1, 3600))

    @property
    def setup(self) -> RlSetup:
        return RlSetup(
            self.layers, self.tokens, self.tokens_per_s, self.slots, self.groups, self.group_size, self.staleness,
            self.publish_every, self.train_s,
        )  # fmt: skip


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    network = network_of(argument)
    if HUB not in (host.name for host in network.hosts) or given.cut not in (host.region for host in network.hosts):
        raise UsageError(f"the experiment rl_run needs a host {HUB!r}, and hosts in the region {given.cut!r}")
    with emulated(argument) as (net, calibrated):
        yield calibrated
        if calibrated["off"]:
            return
        with (
            folders() as (folder, memory),
            Processes(folder / "logs", SMALL_MODULES) as daemons,
            Processes(folder / "logs", MODEL_MODULES) as models,
        ):
            rates: dict[str, dict[str, float]] = {}
            for number, name in enumerate(given.systems):
                own = folder / f"{number}-{name}"
                own.mkdir()
                run = Fleet(Hosts(net), daemons, own, memory / own.name)
                system = RlSystem(net, run, models, given.setup, star=name == "star")
                with closing(_played(net, system, given)) as rows:
                    for said in rows:
                        if "row" in said:
                            said = {"row": {"system": SYSTEMS[name], **said["row"]}}
                            rates.setdefault(name, {})[said["row"]["phase"]] = said["row"]["tokens_per_s"]
                        yield said
                system.remove()
    for phase, rate in rates.get("p2pcast", {}).items():
        if other := rates.get("star", {}).get(phase):
            yield {"row": {"system": f"{P2PCAST} ÷ {STAR}", "phase": phase, "gain": round(rate / other, 2)}}


def _played(net: Namespaces, system: RlSystem, given: Parameters) -> Generator[dict[str, Any], None, None]:
    observer = RunObserver(system)
    began_s = time.monotonic()
    system.start()
    yield {"note": f"started in {time.monotonic() - began_s:.0f} s"}
    system.until(lambda: len(observer.steps()) >= given.warm_up, f"{given.warm_up} steps", STEPS_S)
    yield {"note": f"{given.warm_up} steps in {time.monotonic() - began_s:.0f} s"}
    every = tuple(system.hosts)
    away = {host for host in every if system.sites[host] == given.cut}
    here = tuple(host for host in every if host not in away)
    meter = CpuMeter(system.pids)
    with observer.sampling():
        phases = [_phase(system, BEFORE, given.before_s, every)]
        held = observer.held(away)
        net.cut(given.cut)
        phases.append(_phase(system, CUT, given.cut_s, here))
        net.heal(given.cut)
        phases.append(_phase(system, AFTER, given.after_s, every))
    busy, spent_s = meter.busy(), meter.processes_s()
    system.end()
    record, healed_s = observer.record(), phases[-1].began_s
    caught = [caught_up_s(record, host, healed_s) for host in away]
    ends = observer.endings()
    rows = [figures(record, phase) for phase in phases]
    for row in rows:
        before = rows[0]["tokens_per_s"]
        yield {"row": {**row, "of_before": round(row["tokens_per_s"] / before, 3) if before else None}}
    whole = RunPhase(WHOLE, phases[0].began_s, phases[-1].ended_s, every)
    yield {
        "row": {
            **figures(record, whole),
            "caught_up_s": None if None in caught else round(max(s for s in caught if s is not None), 2),
            "held_at_the_cut": len(held),
            "lost": observer.unsettled(held) + observer.twice(),
            "bound": given.staleness,
            "results": ", ".join(f"{name} {count}" for name, count in sorted(ends.items())),
            "busy": round(busy, 3),
            "cpu_s": {name: round(seconds, 1) for name, seconds in spent_s.items()},
        }
    }


def _phase(system: RlSystem, name: str, lasts_s: float, reached: tuple[str, ...]) -> RunPhase:
    began_s = time.time()
    until_s = time.monotonic() + lasts_s
    while (left_s := until_s - time.monotonic()) > 0:
        system.check()
        time.sleep(min(LOOK_S, left_s))
    return RunPhase(name, began_s, time.time(), reached)

"""``p2pcast lab SCENARIO``: all cases of a scenario, where they can be run, and the document that is made of them.

Promise: whatever happens, namespaces, processes and kernels that were started are gone when this returns; after SIGKILL the kernel sees to it. A case that fails
is said to have failed, and the others are run all the same.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Final, TypeVar

from netem.backend import chosen, results
from netem.doctor import Backend
from netem.lab.emulated import WORK, experiment, prepared
from netem.lab.holds import judged
from netem.lab.machine import machine, versions
from netem.lab.networks import events_of
from netem.lab.scenario import Case, Scenario, cases, filled, parse
from p2pcast.errors import LocalError, UsageError
from p2pcast.store.files import reason

FOLDER: Final = Path(__file__).parent.parent / "scenarios"
SUFFIX: Final = ".toml"
HERE: Final = "here"
"""The backend of a scenario without a network."""

Said = dict[str, Any]
T = TypeVar("T")


def known() -> list[str]:
    """The names of the scenarios that come along."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load(name: str, settings: dict[str, object] | None = None) -> Scenario:
    """By its name, or from a file. Raises UsageError."""
    path = FOLDER / f"{name}{SUFFIX}"
    if "/" in name or name.endswith(SUFFIX):
        path = Path(name)
    elif name not in known():
        raise UsageError(f"there is no scenario {name!r}: `p2pcast lab list` shows them; a file's name ends with {SUFFIX}")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read scenario {path}: {reason(error) if isinstance(error, OSError) else 'not UTF-8'}") from None
    return parse(path.stem, text, settings)


def backend_of(scenario: Scenario, wanted: str = "auto", every: Sequence[Backend] | None = None) -> str:
    """Where its networks can be made; ``wanted`` outranks what it says itself; ``every``: as for ``chosen``. Raises LocalError, UsageError."""
    if scenario.network is None:
        return HERE
    asked = scenario.backend if wanted == "auto" else wanted
    rates = all(case.only_rates for case in cases(scenario))
    if asked == "rate" and not rates:
        raise UsageError(f"scenario {scenario.name} asks for delay or loss: the rate backend has neither")
    return chosen("rate" if asked == "auto" and rates else asked, every)


def run(scenario: Scenario, backend: str, only: Sequence[int] = (), tell: Callable[[str], None] = lambda said: None) -> Said:
    """The document. ``only``: numbers of cases; ``tell`` is given a line now and then. From the main thread. Raises LocalError, UsageError."""
    every = list(cases(scenario))
    if strange := [number for number in only if not 1 <= number <= len(every)]:
        raise UsageError(f"there is no case {strange[0]}: {scenario.name} has {len(every)}")
    wanted = [case for case in every if not only or case.number in only]
    for case in wanted:
        checked(scenario.experiment, case)
    began, clock = datetime.now(UTC), time.monotonic()
    on = machine()
    rows: list[Said] = []
    calibrations: list[Said] = []
    failed: list[Said] = []
    ready = [replace(case, argument=prepared(scenario.experiment, case.argument)) for case in wanted]
    for case, said in _terminable(_said(scenario, backend, ready, tell)):
        if "row" in said:
            rows.append({"case": case.number, **case.keys, **said["row"]})
            tell(f"  {_brief(said['row'])}")
        elif "note" in said:
            tell(f"  {said['note']}")
        elif "off" in said:
            calibrations.append({"case": case.number, **{key: value for key, value in said.items() if key != "case"}})
            for off in said["off"]:
                tell(f"  left out, {off}")
        elif "failed" in said:
            failed.append({"case": case.number, **case.keys, "why": said["failed"]})
            tell(f"  failed: {said['failed']}")
    return {
        "scenario": scenario.name, "what": scenario.what, "paper": scenario.paper, "scale": scenario.scale,
        "experiment": scenario.experiment, "network": scenario.network, "events": scenario.events,
        "parameters": scenario.parameters, "sweep": scenario.sweep, "backend": backend, "machine": on, "versions": versions(),
        "began": began.isoformat(timespec="seconds"), "took_s": round(time.monotonic() - clock, 1),
        "cases": len(every), "run": [case.number for case in wanted], "rows": rows, "failed": failed, "calibrations": calibrations,
        "columns": scenario.columns, "reference": list(scenario.reference),
        "holds": [judged(hold, rows, scenario.sweep) for hold in scenario.holds],
    }  # fmt: skip


def checked(name: str, case: Case) -> None:
    """Whether an experiment's parameters make sense, as its ``Given`` has them. Raises UsageError that names the key, and the case."""
    form = getattr(import_module(experiment(name).__module__), "Given", None)
    check = getattr(form, "check", None)
    # Besides the instance: what befalls hosts, where that makes a difference.
    knows = check is not None and len(signature(check).parameters) > 1
    try:
        if case.argument["events"] and not knows:
            raise UsageError(f"events: nothing can befall hosts in experiment {name!r}")
        if form is None:
            return
        given = filled(form, case.argument["parameters"], "parameters")
        if check is not None:
            check(given, *([events_of(case.argument)] if knows else []))
    except UsageError as error:
        raise UsageError(f"case {case.number}: {error}") from None


def _said(
    scenario: Scenario, backend: str, wanted: Sequence[Case], tell: Callable[[str], None]
) -> Generator[tuple[Case, Said], None, None]:
    """What cases say, each with its case. As many as can be are run in one kernel; where that ends early, the rest in another."""
    left = {case.number: case for case in wanted}
    while left:
        listed = [{"number": case.number, "argument": case.argument} for case in left.values()]
        at = next(iter(left))
        _begin(left[at], scenario, tell)
        try:
            with closing(results(backend, WORK, {"experiment": scenario.experiment, "cases": listed})) as saying:  # type: ignore[type-var]
                for said in saying:
                    yield left[at], said
                    if "done" in said or "failed" in said:
                        del left[at]
                        if left:
                            at = next(iter(left))
                            _begin(left[at], scenario, tell)
            if left:
                raise LocalError("it ended without a word")
        except UsageError:
            raise
        except LocalError as error:
            yield left.pop(at), {"failed": str(error)}


def _terminable(said: Generator[T, None, None]) -> Iterator[T]:
    """SIGTERM meanwhile is what Ctrl-C is: whatever was made is ended first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with closing(said):
            yield from said
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(case: Case, scenario: Scenario, tell: Callable[[str], None]) -> None:
    tell(f"case {case.number}: {_brief(case.keys) or scenario.what}")


def _brief(row: Any) -> str:
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())

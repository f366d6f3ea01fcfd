"""``p2pcast lab SCENARIO``: runs all cases of a scenario whose network can be made, and returns the document.

Promise: all namespaces, processes and kernels are gone when ``run`` returns; after SIGKILL the kernel ends them. A
failed case is reported as failed, and the others still run.
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

from netem.emulation.backend import chosen, results
from netem.emulation.doctor import Backend
from netem.lab.case_network import WORK, experiment, prepared
from netem.lab.machine import machine, versions
from netem.lab.network_tables import events_of
from netem.lab.requirements import judged
from netem.lab.scenario import Scenario, SweepCase, cases, filled, parse
from p2pcast.files.atomic_files import reason
from p2pcast.ground.errors import LocalError, UsageError

FOLDER: Final = Path(__file__).parent.parent / "scenarios"
SUFFIX: Final = ".toml"
HERE: Final = "here"
"""The backend of a scenario without a network."""

Record = dict[str, Any]
T = TypeVar("T")


def known() -> list[str]:
    """The names of the included scenarios."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load(name: str, settings: dict[str, object] | None = None) -> Scenario:
    """A scenario by name, or from a file. Raises UsageError."""
    path = FOLDER / f"{name}{SUFFIX}"
    if "/" in name or name.endswith(SUFFIX):
        path = Path(name)
    elif name not in known():
        raise UsageError(
            f"there is no scenario {name!r}: `p2pcast lab list` shows the included ones; a file's name ends with "
            f"{SUFFIX}"
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read scenario {path}: {reason(error) if isinstance(error, OSError) else 'not UTF-8'}"
        ) from None
    return parse(path.stem, text, settings)


def backend_of(scenario: Scenario, wanted: str = "auto", every: Sequence[Backend] | None = None) -> str:
    """The backend for the scenario's networks. ``wanted`` takes precedence over the scenario's own; ``every``: as for
    ``chosen``. Raises LocalError, UsageError.
    """
    if scenario.network is None:
        return HERE
    asked = scenario.backend if wanted == "auto" else wanted
    rates = all(case.only_rates for case in cases(scenario))
    if asked == "rate" and not rates:
        raise UsageError(f"scenario {scenario.name} asks for delay or loss: the rate backend has neither")
    return chosen("rate" if asked == "auto" and rates else asked, every)


def run(
    scenario: Scenario, backend: str, only: Sequence[int] = (), show: Callable[[str], None] = lambda record: None
) -> Record:
    """The document. ``only``: case numbers; ``show`` receives progress lines. From the main thread. Raises LocalError,
    UsageError.
    """
    every = list(cases(scenario))
    if strange := [number for number in only if not 1 <= number <= len(every)]:
        raise UsageError(f"there is no case {strange[0]}: {scenario.name} has {len(every)}")
    wanted = [case for case in every if not only or case.number in only]
    for case in wanted:
        checked(scenario.experiment, case)
    began, clock = datetime.now(UTC), time.monotonic()
    on = machine()
    rows: list[Record] = []
    calibrations: list[Record] = []
    failed: list[Record] = []
    ready = [replace(case, argument=prepared(scenario.experiment, case.argument)) for case in wanted]
    for case, record in _terminable(_records(scenario, backend, ready, show)):
        if "row" in record:
            rows.append({"case": case.number, **case.keys, **record["row"]})
            show(f"  {_brief(record['row'])}")
        elif "note" in record:
            show(f"  {record['note']}")
        elif "off" in record:
            calibrations.append({"case": case.number, **{key: value for key, value in record.items() if key != "case"}})
            for off in record["off"]:
                show(f"  left out, {off}")
        elif "failed" in record:
            failed.append({"case": case.number, **case.keys, "why": record["failed"]})
            show(f"  failed: {record['failed']}")
    return {
        "scenario": scenario.name,
        "what": scenario.what,
        "paper": scenario.paper,
        "scale": scenario.scale,
        "experiment": scenario.experiment,
        "network": scenario.network,
        "events": scenario.events,
        "parameters": scenario.parameters,
        "sweep": scenario.sweep,
        "backend": backend,
        "machine": on,
        "versions": versions(),
        "began": began.isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - clock, 1),
        "cases": len(every),
        "run": [case.number for case in wanted],
        "rows": rows,
        "failed": failed,
        "calibrations": calibrations,
        "columns": scenario.columns,
        "reference": list(scenario.reference),
        "holds": [judged(hold, rows, scenario.sweep) for hold in scenario.holds],
    }


def checked(name: str, case: SweepCase) -> None:
    """Check the parameters of a case by the experiment's ``Parameters``. Raises UsageError that names the key and the
    case.
    """
    form = getattr(import_module(experiment(name).__module__), "Parameters", None)
    check = getattr(form, "check", None)
    # Some checks also need the case's events.
    knows = check is not None and len(signature(check).parameters) > 1
    try:
        if case.argument["events"] and not knows:
            raise UsageError(f"events: experiment {name!r} does not support any")
        if form is None:
            return
        given = filled(form, case.argument["parameters"], "parameters")
        if check is not None:
            check(given, *([events_of(case.argument)] if knows else []))
    except UsageError as error:
        raise UsageError(f"case {case.number}: {error}") from None


def _records(
    scenario: Scenario, backend: str, wanted: Sequence[SweepCase], show: Callable[[str], None]
) -> Generator[tuple[SweepCase, Record], None, None]:
    """The results of all cases, each with its case. As many cases as possible run in one kernel; if that kernel ends
    early, the rest run in another.
    """
    left = {case.number: case for case in wanted}
    while left:
        listed = [{"number": case.number, "argument": case.argument} for case in left.values()]
        at = next(iter(left))
        _begin(left[at], scenario, show)
        try:
            with closing(results(backend, WORK, {"experiment": scenario.experiment, "cases": listed})) as saying:  # type: ignore[type-var]
                for record in saying:
                    yield left[at], record
                    if "done" in record or "failed" in record:
                        del left[at]
                        if left:
                            at = next(iter(left))
                            _begin(left[at], scenario, show)
            if left:
                raise LocalError("the emulated kernel ended without a result")
        except UsageError:
            raise
        except LocalError as error:
            yield left.pop(at), {"failed": str(error)}


def _terminable(record: Generator[T, None, None]) -> Iterator[T]:
    """Treat SIGTERM as Ctrl-C meanwhile, so that everything is cleaned up first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with closing(record):
            yield from record
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(case: SweepCase, scenario: Scenario, show: Callable[[str], None]) -> None:
    show(f"case {case.number}: {_brief(case.keys) or scenario.what}")


def _brief(row: Any) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )

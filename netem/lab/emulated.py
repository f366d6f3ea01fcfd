"""A case's network: made, measured, and gone with the block. What runs beside the experiment, where its network is."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from netem.calibration import measure
from netem.lab.networks import events_of, network_of
from netem.namespaces import Namespaces, namespaces
from p2pcast.errors import P2PCastError, UsageError
from p2pcast.transport.sockets import settled

WORK = "netem.lab.emulated:results"
CALIBRATED = "calibrated"
"""Of an argument: what was measured of the same network before, in the same kernel."""
CALIBRATIONS = 5
"""A busy machine may spoil the first ones; only what was off is measured again."""


@contextmanager
def emulated(argument: Mapping[str, Any]) -> Iterator[tuple[Namespaces, dict[str, Any]]]:
    """The network of an argument, and ``{calibration: […], off: […]}`` to be yielded first: no rows where ``off`` says that it is not what was asked for.

    From the main thread. Raises LocalError when the machine will not, UsageError for a congestion control that it has not.
    """
    network = network_of(argument)
    if network.congestion is not None:
        settled(network.congestion)
    later = all(event.link is None or event.link.only_rates for event in events_of(argument))
    with namespaces(network, only_rates=later) as net:
        yield net, argument.get(CALIBRATED) or calibrated(net)


def calibrated(net: Namespaces) -> dict[str, Any]:
    """``off``: what is not as it was asked for, also after several tries."""
    found = {(m.sender, m.receiver): m.document() for m in measure(net)}
    tries = 1
    while (off := [pair for pair, m in found.items() if m["faults"]]) and tries < CALIBRATIONS:
        found |= {(m.sender, m.receiver): m.document() for m in measure(net, off)}
        tries += 1
    return {"calibration": list(found.values()), "tries": tries, "off": [fault for m in found.values() for fault in m["faults"]]}


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """``{experiment, cases: [{number, argument}]}``: what the experiment yields for each, with its ``case``; then ``{case, done}`` or ``{case, failed: why}``.

    The next case is tried also where one has failed, for whatever reason. A network that was measured for one case is not measured again for the next. Raises UsageError, while there is no row that
    would be lost with it.
    """
    work = experiment(argument["experiment"])
    known: dict[str, dict[str, Any]] = {}
    rows = 0
    for case in argument["cases"]:
        number, given = case["number"], dict(case["argument"])
        network = json.dumps(given.get("network"), sort_keys=True)
        if network in known:
            given[CALIBRATED] = known[network]
        try:
            with closing(work(given)) as saying:
                for said in saying:
                    if "off" in said and not said["off"]:
                        known[network] = {**said, "again": True}
                    rows += "row" in said
                    yield {"case": number, **said}
        except P2PCastError as error:
            if isinstance(error, UsageError) and not rows:
                raise
            yield {"case": number, "failed": str(error)}
        except Exception as error:  # noqa: BLE001 - a bug of ours, or a machine that is not what it was: what is known by now is not lost for it
            at = traceback.extract_tb(error.__traceback__)[-1]
            yield {"case": number, "failed": f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"}
        else:
            yield {"case": number, "done": True}


def experiment(name: str) -> Any:
    """Its ``results``. Raises UsageError where there is none of that name."""
    return _module(name).results


def prepared(name: str, argument: Mapping[str, Any]) -> Mapping[str, Any]:
    """The argument as the experiment wants it: what its ``prepared`` makes of it, on this machine itself whatever the backend, where it has one."""
    prepare = getattr(_module(name), "prepared", None)
    ready: Mapping[str, Any] = argument if prepare is None else prepare(argument)
    return ready


def _module(name: str) -> ModuleType:
    module = f"netem.lab.experiments.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UsageError(f"there is no experiment {name!r}") from None

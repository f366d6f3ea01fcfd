"""Context manager for a case's network, and the loop over cases that runs inside a backend."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from netem.emulation.calibration import calibrated
from netem.emulation.namespaces import Namespaces, namespaces
from netem.lab.network_tables import events_of, network_of
from p2pcast.ground.errors import P2PCastError, UsageError
from p2pcast.transport.socket_options import choose_sockets

WORK = "netem.lab.case_network:results"
CALIBRATED = "calibrated"
"""Key of an argument: earlier measurements of the same network in the same kernel."""


@contextmanager
def emulated(argument: Mapping[str, Any]) -> Iterator[tuple[Namespaces, dict[str, Any]]]:
    """Context manager for the argument's network, with ``{calibration: […], off: […]}``, to be yielded first. If
    ``off`` is not empty, the network deviates from the request and there are no rows.

    From the main thread. Raises LocalError if the network cannot be built, UsageError for an unavailable congestion
    control.
    """
    network = network_of(argument)
    if network.congestion is not None:
        choose_sockets(network.congestion)
    later = all(event.link is None or event.link.only_rates for event in events_of(argument))
    with namespaces(network, only_rates=later) as net:
        yield net, argument.get(CALIBRATED) or calibrated(net)


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the cases of ``{experiment, cases: [{number, argument}]}``. Yields each result of the experiment with its
    ``case`` number, then ``{case, done}`` or ``{case, failed: why}``.

    A failed case does not stop the next. A network measured for one case is not measured again. Raises UsageError only
    before the first row, so no row is lost.
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
        except Exception as error:  # noqa: BLE001 - a bug, or a changed machine: rows known by now are kept
            at = traceback.extract_tb(error.__traceback__)[-1]
            yield {"case": number, "failed": f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"}
        else:
            yield {"case": number, "done": True}


def experiment(name: str) -> Any:
    """Return the experiment's ``results`` function. Raises UsageError for an unknown name."""
    return _module(name).results


def prepared(name: str, argument: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the argument as changed by the experiment's ``prepared`` function, if it has one. That function always
    runs on this machine, whatever the backend.
    """
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

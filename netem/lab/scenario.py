"""A scenario, read from TOML: experiment, networks, plots and requirements. Pure. docs/guides/wan-experiments.md
describes each key.

Raises UsageError that names the key for every unknown, missing, mistyped or absurd value, before anything is run.
"""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from netem.emulation.tables import Table, filled, kind_of
from netem.lab.network_tables import DO, NetworkEvent, events_of, network_of
from p2pcast.ground.errors import UsageError

__all__ = [
    "BACKENDS",
    "DO",
    "NetworkEvent",
    "Plot",
    "Requirement",
    "Scenario",
    "SweepCase",
    "cases",
    "events_of",
    "filled",
    "network_of",
    "parse",
]

BACKENDS: Final = ("auto", "native", "uml", "rate")
MAX_CASES: Final = 500
MAX_MINUTES: Final = 24 * 60.0
EVERY: Final = "*"
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Plot:
    """``series``: keys whose values distinguish the lines or groups of bars. ``where``: filter of the shown rows, as
    key → values.
    """

    x: str
    y: str
    file: str
    title: str
    series: tuple[str, ...] = ()
    kind: str = "line"
    log: str = ""
    x_label: str = ""
    y_label: str = ""
    where: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement on rows. The value is ``key``, divided by ``against`` if given. ``against`` is another key of the
    same row, or key → values that select other rows. Those rows agree in all sweep keys and ``same`` keys, except the
    keys of ``against``. ``above``, ``below``: a number or a key of the row. ``within``: allowed deviation from 1.
    """

    what: str
    key: str
    where: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    against: str | Mapping[str, tuple[Value, ...]] | None = None
    same: tuple[str, ...] = ()
    above: float | str | None = None
    below: float | str | None = None
    within: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """``network``, ``events``, ``parameters``: as in the file; ``cases`` inserts the sweep's values. ``network`` is
    None for an experiment without one.
    """

    name: str
    what: str
    paper: str
    scale: str
    minutes: float
    backend: str
    experiment: str
    network: Mapping[str, Any] | None
    events: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Any]
    sweep: Mapping[str, tuple[Value, ...]]
    columns: Mapping[str, str]
    plots: tuple[Plot, ...]
    reference: tuple[Mapping[str, Any], ...]
    holds: tuple[Requirement, ...]

    @property
    def argument(self) -> dict[str, Any]:
        """The argument of the experiment, without the sweep's values."""
        without = {"events": list(self.events), "parameters": dict(self.parameters)}
        return copy.deepcopy(without if self.network is None else {"network": dict(self.network), **without})


@dataclass(frozen=True, slots=True)
class SweepCase:
    """One point of the sweep: its keys and the experiment's argument. ``number``: from 1, independent of the selection
    of cases.
    """

    number: int
    keys: Mapping[str, Value]
    argument: Mapping[str, Any]

    @property
    def only_rates(self) -> bool:
        """Whether the network never has delay or loss, events included; true without a network."""
        if "network" not in self.argument:
            return True
        links = [event.link for event in events_of(self.argument) if event.link is not None]
        return network_of(self.argument).only_rates and all(link.only_rates for link in links)


def parse(name: str, text: str, settings: Mapping[str, object] | None = None) -> Scenario:
    """``settings``: key → value as in the sweep, replacing values of the file. A list replaces that key's sweep, or a
    parameter that is a list.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"scenario {name} is not TOML: {error}") from None
    try:
        scenario = _scenario(name, Table(document))
        if settings:
            scenario = _set(scenario, settings)
        list(cases(scenario))
    except UsageError as error:
        raise UsageError(f"scenario {name}: {error}") from None
    return scenario


def cases(scenario: Scenario) -> Iterator[SweepCase]:
    """The product of all sweep lists; the last list changes fastest. Raises UsageError."""
    every = list(itertools.product(*scenario.sweep.values()))
    if len(every) > MAX_CASES:
        raise UsageError(f"sweep makes {len(every)} cases: the limit is {MAX_CASES}")
    for number, values in enumerate(every, 1):
        keys, argument = dict(zip(scenario.sweep, values, strict=True)), scenario.argument
        for key, value in keys.items():
            put(argument, key, value)
        if "network" in argument:
            network_of(argument)
            events_of(argument)
        yield SweepCase(number, keys, argument)


def put(argument: dict[str, Any], key: str, value: object) -> None:
    """``hosts.NAME.KEY``, ``regions.NAME.KEY`` (``*``: all of them), ``events.NUMBER.KEY`` or ``network.KEY``; any
    other key is a parameter. Raises UsageError.
    """
    first, _, rest = key.partition(".")
    if first not in ("hosts", "regions", "events", "network"):
        argument["parameters"][key] = value
        return
    if first != "events" and "network" not in argument:
        raise UsageError(f"{key}: there is no network")
    if first == "network":
        if rest in ("hosts", "regions"):
            raise UsageError(f"{key}: write {rest}.NAME.KEY")
        argument["network"][rest] = value
        return
    name, _, inner = rest.rpartition(".")
    listed = argument["events"] if first == "events" else argument["network"].get(first, [])
    named = [
        each for at, each in enumerate(listed, 1) if name in (EVERY, str(at) if first == "events" else each.get("name"))
    ]
    if not named or not inner:
        raise UsageError(
            f"{key}: there is no {first[:-1]} {name!r}; write {first}.{'NUMBER' if first == 'events' else 'NAME'}.KEY"
        )
    for each in named:
        each[inner] = value


def _set(scenario: Scenario, settings: Mapping[str, object]) -> Scenario:
    sweep, fixed = dict(scenario.sweep), scenario.argument
    for key, value in settings.items():
        if isinstance(value, list) and not (key not in sweep and isinstance(fixed["parameters"].get(key), list)):
            sweep[key] = _values(value, key)
        else:
            sweep.pop(key, None)
            put(fixed, key, value)
    network, events, parameters = fixed.get("network"), fixed["events"], fixed["parameters"]
    return replace(scenario, sweep=sweep, network=network, events=events, parameters=parameters)


def _scenario(name: str, table: Table) -> Scenario:
    minutes = table.required("minutes", float)
    if not 0 < minutes <= MAX_MINUTES:
        raise UsageError(f"minutes is {minutes:g}: it must be above 0, to {MAX_MINUTES:g}")
    experiment = table.text("experiment")
    if not experiment.isidentifier():
        raise UsageError(f"experiment is {experiment!r}: it must be the name of a module")
    network: dict[str, Any] = table.with_default("network", dict, {})
    for key in ("regions", "hosts"):
        if key in network:
            raise UsageError(f"network.{key} is not known: {key} are separate tables, [[{key}]]")
        if listed := _dicts(table, key):
            network[key] = listed
    if network and "hosts" not in network:
        raise UsageError("hosts is missing: a network has at least one")
    sweep = table.with_default("sweep", dict, {})
    columns = table.with_default("columns", dict, {})
    scenario = Scenario(
        name,
        table.text("what"),
        table.with_default("paper", str, ""),
        table.with_default("scale", str, ""),
        minutes,
        table.choice("backend", BACKENDS, "auto"),
        experiment,
        network or None,
        _dicts(table, "events"),
        table.with_default("parameters", dict, {}),
        {key: _values(kind_of(value, list, f"sweep.{key}"), f"sweep.{key}") for key, value in sweep.items()},
        {key: kind_of(value, str, f"columns.{key}") for key, value in columns.items()},
        tuple(map(_plot, table.tables("plots"))),
        tuple(_reference(each, at) for at, each in enumerate(table.with_default("reference", list, []), 1)),
        tuple(map(_hold, table.tables("holds"))),
    )
    table.close()
    if scenario.events and scenario.network is None:
        raise UsageError("events need hosts: there is no network")
    return scenario


def _dicts(table: Table, key: str) -> list[dict[str, Any]]:
    listed = table.with_default(key, list, [])
    return [kind_of(each, dict, f"{table.called(key)}[{at}]") for at, each in enumerate(listed, 1)]


def _values(listed: list[Any], called: str) -> tuple[Value, ...]:
    if not listed or not all(isinstance(each, Value) for each in listed):
        raise UsageError(f"{called} must be a list of one or more strings, numbers or truth values")
    if len(set(map(repr, listed))) != len(listed):
        raise UsageError(f"{called} has a value twice")
    return tuple(listed)


def _where(table: Table, key: str) -> dict[str, tuple[Value, ...]]:
    content = table.with_default(key, dict, {})
    return {
        name: _values(value if isinstance(value, list) else [value], f"{table.called(key)}.{name}")
        for name, value in content.items()
    }


def _plot(table: Table) -> Plot:
    file = table.text("file")
    if not file.replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"{table.called('file')} is {file!r}: a part of a file name has letters, digits, '-' or '_'")
    plot = Plot(
        table.text("x"), table.text("y"), file, table.text("title"), table.texts("series"),
        table.choice("kind", ("line", "bar"), "line"), table.choice("log", ("", "x", "y", "xy"), ""),
        table.with_default("x_label", str, ""), table.with_default("y_label", str, ""), _where(table, "where"),
    )  # fmt: skip
    table.close()
    return plot


def _reference(row: object, at: int) -> Mapping[str, Any]:
    if not isinstance(row, dict) or not isinstance(row.get("source"), str):
        raise UsageError(f"reference[{at}] must be a table with a source: a section or figure of the paper")
    if wrong := [key for key, value in row.items() if not isinstance(value, Value)]:
        raise UsageError(f"reference[{at}].{wrong[0]} must be a string, a number or a truth value")
    return row


def _bound(table: Table, key: str) -> float | str | None:
    value = table.raw(key)
    return value if value is None or isinstance(value, str) else kind_of(value, float, table.called(key))


def _hold(table: Table) -> Requirement:
    what, key, where = table.text("what"), table.text("key"), _where(table, "where")
    against: Any = (
        _where(table, "against") if isinstance(table.peek("against"), dict) else table.optional("against", str)
    )
    same, above, below, within = (
        table.texts("same"),
        _bound(table, "above"),
        _bound(table, "below"),
        table.optional("within", float),
    )
    if above is None and below is None and within is None:
        raise UsageError(
            f"{table.called('above')}, {table.called('below')} or {table.called('within')} must give the bound"
        )
    table.close()
    return Requirement(what, key, where, against, same, above, below, within)

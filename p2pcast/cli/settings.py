"""Turns the fields of a configuration record into options, environment variables and keys of a TOML file.

A program reads its settings from a frozen dataclass. Each field is a ``setting``, or a ``part`` if several options
make up one value. ``options`` derives a command's options from such a record, in the order of its fields, and
passes the record to the command. ``table`` derives the keys of one table of a TOML file.

- The option of ``max_age_s`` is ``--max-age``. Its variable is P2PCAST, COMMAND and MAX_AGE, joined by underscores.
- The type comes from the annotation: a number has the setting's range, a ``Literal`` is a choice, a ``bool`` is a flag,
  and a ``tuple[T, ...]`` is repeatable.
- The error for a wrong value names the option, or the key and its line in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, get_origin, get_type_hints

import click

from p2pcast.ground.errors import UsageError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
REQUIRED = MISSING
"""Default of a setting that the user has to give, unless ``absent`` gives it."""


class How(TypedDict, total=False):
    """How an option differs from what the annotation says.

    ``above``, ``below``: exclusive bounds of a number. ``choices``: the allowed texts. ``type``: replaces the
    annotation's. ``name``: the parameter's name, if it is not the field's. ``flag``: the option's name, if it is not
    the parameter's. ``argument``: an argument instead of an option. ``inverse``: a flag that makes the field false.
    ``unit``: the option's value is multiplied by this. ``absent``: computes the value from the other values if the user
    gives none. ``reads``: checks and converts each value; raises UsageError. ``show``: the default as the help text
    shows it. ``complete``: shell completion.
    """

    above: float
    below: float
    choices: Sequence[str]
    type: click.ParamType[Any]
    name: str
    flag: str
    argument: bool
    inverse: bool
    unit: int
    metavar: str
    absent: Callable[[Mapping[str, Any]], Any]
    reads: Callable[[Any], Any]
    show: bool | str
    complete: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting for the parameter ``name``. ``default``: as the user would write it."""

    name: str
    hint: Any
    default: Any
    help: str
    low: float | None
    high: float | None
    how: How

    def option(self, command: str | None) -> Callable[[F], F]:
        """Return a decorator that adds the option. ``command``: prefix of the variable's name; None: no variable."""
        how, required = self.how, self.default is REQUIRED
        flag = how.get("flag", self.name.removesuffix("_s")).replace("_", "-")
        attributes: dict[str, Any] = {
            "type": self._type(),
            "metavar": how.get("metavar", "SECONDS" if self.name.endswith("_s") else None),
            "callback": self._read if "reads" in how else None,
            "shell_complete": how.get("complete"),
            "envvar": None if command is None else f"P2PCAST_{command}_{flag.replace('-', '_')}".upper(),
        }
        if not required:
            attributes["default"] = None if self.default == () else self.default
        elif "absent" not in how:
            attributes["required"] = True
        if how.get("argument"):
            return click.argument(self.name, **attributes)
        # With is_flag=False, click would take the option's value for optional.
        is_flag = self.hint is bool or None
        attributes |= {"help": self.help, "show_default": how.get("show"), "is_flag": is_flag}
        return click.option(f"--{flag}", self.name, multiple=_is_several(self.hint), **attributes)

    def _type(self) -> click.ParamType[Any]:
        how = self.how
        hint = get_args(self.hint)[0] if _is_several(self.hint) else self.hint
        if "type" in how:
            return how["type"]
        if chosen := how.get("choices") or choices(hint):
            return click.Choice(list(chosen))
        if hint in (int, float):
            kind: Any = click.IntRange if hint is int else click.FloatRange
            low, high = how.get("above", self.low), how.get("below", self.high)
            made: click.ParamType[Any] = kind(low, high, min_open="above" in how, max_open="below" in how)
            return made
        return {Path: PATH, bool: click.BOOL, str: click.STRING}[hint]

    def _read(self, ctx: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value is None or ctx.resilient_parsing:
            return value
        reads = self.how["reads"]
        try:
            return tuple(map(reads, value)) if _is_several(self.hint) else reads(value)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None

    def value(self, given: Mapping[str, Any]) -> Any:
        """Return the field's value, computed from the values that the user gives."""
        value, how = given[self.name], self.how
        if value is None:
            return how["absent"](given) if "absent" in how else None
        return not value if how.get("inverse") else value * how["unit"] if "unit" in how else value


def setting(
    default: Any = REQUIRED, text: str = "", low: float | None = None, high: float | None = None, **how: Unpack[How]
) -> Any:
    """Declare a field set by one option: its default as the user would write it, its help text and a number's range."""
    value = default
    if isinstance(default, str) and "type" in how:
        value = how["type"].convert(default, None, None)
    elif how.get("inverse"):
        value = not default
    elif "unit" in how:
        value = default * how["unit"]
    return field(default=value, metadata={"settings": {"": (default, text, low, high, how)}})


def part(make: Callable[..., Any], default: Any = REQUIRED, **settings: Any) -> Any:
    """Declare a field that ``make`` builds from several options. ``settings``: one ``setting`` for each parameter of
    ``make``, whose annotations give the types.
    """
    stated = {name: one.metadata["settings"][""] for name, one in settings.items()}
    return field(default=default, metadata={"make": make, "settings": stated})


def _parts(record: type[Any]) -> Iterator[tuple[str, Callable[..., Any] | None, list[Setting]]]:
    """Yield each field that options set, the function that builds it if it is a part, and its settings."""
    hints = get_type_hints(record)
    for one in fields(record):
        if "settings" in one.metadata:
            make = one.metadata.get("make")
            known = hints if make is None else get_type_hints(make)
            yield (
                one.name,
                make,
                [
                    Setting(
                        how.get("name", name or one.name),
                        _plain(known[name or one.name]),
                        default,
                        text,
                        low,
                        high,
                        how,
                    )
                    for name, (default, text, low, high, how) in one.metadata["settings"].items()
                ],
            )


def settings_of(record: type[Any]) -> list[Setting]:
    """Return all settings of a record, in the order of its fields."""
    return [each for _, _, settings in _parts(record) for each in settings]


def options(record: type[Any], command: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a record's options to a function whose first argument is the record. ``command``:
    prefix of the variables' names, as in ``seed``, or None for no variables.
    """
    settings = settings_of(record)
    names = {each.name for each in settings}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**given: Any) -> Any:
            return function(made(record, given), **{name: given[name] for name in given.keys() - names})

        for each in reversed(settings):
            called = each.option(command)(called)
        return called

    return decorate


def made(record: type[T], given: Mapping[str, Any]) -> T:
    """Build the record from its parameters' values. Raises UsageError."""
    values = {}
    for name, make, settings in _parts(record):
        mine = {each.name: each.value(given) for each in settings}
        values[name] = mine[settings[0].name] if make is None else make(**mine)
    return record(**values)


def table(record: type[Any], name: str) -> click.Command:
    """Return a command whose options are the keys of a TOML table, so that ``config.tables`` can check the table."""
    return click.command(name)(options(record, None)(lambda made: made))


def choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a Literal; empty for any other type."""
    return get_args(hint) if get_origin(hint) is Literal else ()


def _plain(hint: Any) -> Any:
    """Return the type without its ``| None``."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) and len(kinds) == 1 else hint


def _is_several(hint: Any) -> bool:
    return get_origin(hint) is tuple and get_args(hint)[-1] is ...

"""Every command and its parameters: names, types, defaults, variables of the environment. Help texts are free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from pinned import check

from p2pcast.cli import cli

SAMPLES = (
    "",
    "auto",
    "7",
    "-1",
    "1gbit",
    "1kB",
    "host",
    "host:9",
    ":9",
    "[::1]:9",
    "0.12",
    "live",
    "never",
    "90",
    "2h",
)
"""Own types of parameters have no attributes to compare; they are pinned by what they make of these."""
REFUSED = "refused"
PATH_FLAGS = ("exists", "file_okay", "dir_okay", "readable", "writable", "executable", "resolve_path", "allow_dash")


Found = tuple[str, click.Command, click.Context]
"""A command, with its whole name before it."""


def commands(command: click.Command, ctx: click.Context, path: str) -> Iterator[Found]:
    yield path, command, ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None, f"{path} lists {name} and does not have it"
            below = click.Context(inner, parent=ctx, info_name=name, **inner.context_settings)
            yield from commands(inner, below, f"{path} {name}")


def everything() -> list[Found]:
    top = click.Context(cli, info_name="p2pcast", **cli.context_settings)
    return list(commands(cli, top, "p2pcast"))


def plain(value: Any) -> Any:
    """``value`` as JSON holds it; values without a form in JSON, as text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return f"{type(value).__name__} {value}"
    return list(value) if isinstance(value, tuple) else value


def of_type(kind: click.ParamType[Any], param: click.Parameter, ctx: click.Context) -> dict[str, Any]:
    out: dict[str, Any] = {"name": kind.name}
    if isinstance(kind, click.Choice):
        out |= {"choices": [str(c) for c in kind.choices], "case_sensitive": kind.case_sensitive}
    elif isinstance(kind, click.IntRange | click.FloatRange):
        out |= {name: getattr(kind, name) for name in ("min", "max", "min_open", "max_open", "clamp")}
    elif isinstance(kind, click.Path):
        out |= {flag: True for flag in PATH_FLAGS if getattr(kind, flag)}
    elif isinstance(kind, click.Tuple):
        out["of"] = [of_type(t, param, ctx) for t in kind.types]
    elif not type(kind).__module__.startswith("click"):
        made = {sample: converted(kind, sample, param, ctx) for sample in SAMPLES}
        out["makes"] = {sample: value for sample, value in made.items() if value != REFUSED}
    return out


def converted(kind: click.ParamType[Any], sample: str, param: click.Parameter, ctx: click.Context) -> Any:
    try:
        value = kind.convert(sample, param, ctx)
    except click.ClickException:
        return REFUSED
    return plain(value) if value is None or isinstance(value, int | float | str | tuple) else str(value)


def default(param: click.Parameter, ctx: click.Context) -> Any:
    """None: there is none; click has changed its own mark for that between releases."""
    value = param.get_default(ctx, call=False)
    if type(value).__name__ == "Sentinel":
        return None
    return "computed" if callable(value) else plain(value)


def variables(param: click.Parameter, ctx: click.Context) -> list[str]:
    """Of the environment, as click looks them up."""
    if param.envvar is not None:
        return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)
    if isinstance(param, click.Option) and param.allow_from_autoenv and ctx.auto_envvar_prefix and param.name:
        return [f"{ctx.auto_envvar_prefix}_{param.name.upper()}"]
    return []


def described(param: click.Parameter, ctx: click.Context) -> dict[str, Any]:
    """The attributes that differ from click's defaults; so a change to or from a default shows."""
    out: dict[str, Any] = {
        "kind": param.param_type_name,
        "options": sorted(param.opts),
        "secondary": sorted(param.secondary_opts),
        "type": of_type(param.type, param, ctx),
        "required": param.required,
        "multiple": param.multiple,
        "nargs": param.nargs if param.nargs != 1 else None,
        "metavar": param.metavar,
        "environment": variables(param, ctx),
        "eager": param.is_eager,
    }
    if isinstance(param, click.Option):
        out |= {"is_flag": param.is_flag, "count": param.count, "hidden": param.hidden}
    out = {key: value for key, value in out.items() if value not in (None, False, [])}
    return out | {"default": default(param, ctx)}


def test_every_command_has_the_parameters_that_were_pinned() -> None:
    found = {}
    for path, command, ctx in everything():
        found[path] = {
            "parameters": {str(p.name): described(p, ctx) for p in command.params},
            "arguments in order": [p.name for p in command.params if isinstance(p, click.Argument)],
            "help options": sorted(ctx.help_option_names),
            "hidden": command.hidden,
            "help where nothing is given": command.no_args_is_help,
        }
    assert len(found) > 20
    check("commands", found)


def test_no_two_parameters_share_a_variable() -> None:
    """A shared variable would set both parameters."""
    seen: dict[str, str] = {}
    for path, command, ctx in everything():
        for param in command.params:
            for variable in variables(param, ctx):
                place = f"{path} {param.name}"
                assert seen.setdefault(variable, place) == place, f"{variable}: {seen[variable]} and {place}"


@pytest.mark.parametrize("path", ["p2pcast seed", "p2pcast join", "p2pcast bench", "p2pcast token create"])
def test_the_walk_reaches(path: str) -> None:
    """Commands that are imported when they are used are among those that were compared."""
    assert path in {found for found, _, _ in everything()}

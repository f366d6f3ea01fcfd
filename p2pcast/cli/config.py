"""Reads options from a TOML file, which has a table for each command and the same names as on the command line.

    log-format = "json"
    [join]
    hub = "hub.example:7077"
    install = ["vllm:http://127.0.0.1:8000"]

Precedence:

- A flag overrides an environment variable.
- A variable overrides the file.

An unknown key, or a value of the wrong type, raises a UsageError that names the line.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click

from p2pcast.files.atomic_files import reason
from p2pcast.ground.errors import UsageError
from p2pcast.ground.plain_text import written_text

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"""\s*("[^"]*"|'[^']*'|[A-Za-z0-9_-]+)\s*[=.]""")


def option(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Callback of ``--config``: the file's values become the defaults of all commands. The option must be eager, so
    that the file is read before other options take their defaults.
    """
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = defaults(path, ctx)


def defaults(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the defaults in a TOML file, nested like click's ``default_map``. Raises UsageError, whose message names
    the file and, if known, the line.
    """
    try:
        text = written_text(path.read_bytes())
        document = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a TOML file: it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not a TOML file: {error}") from None
    return _File(path, text).table(document, ctx.command, ctx, ())


def tables(path: Path, group: click.Group) -> dict[str, dict[str, Any]]:
    """Return the values of a TOML file with one table for each command of ``group``: table → parameter → value.

    Values are checked and converted as on a command line. A missing key or table gets the defaults. Raises UsageError
    with the line in the file.
    """
    ctx = click.Context(group)
    given = defaults(path, ctx)
    file = _File(path, written_text(path.read_bytes()))
    out: dict[str, dict[str, Any]] = {}
    for name, command in group.commands.items():
        try:
            inner = command.make_context(name, [], default_map=given.get(name, {}))
        except click.BadParameter as error:
            key = _key(error.param) if error.param is not None else ""
            raise file.wrong((name,), key, f"{key}: {error.message}") from None
        out[name] = dict(inner.params)
    return out


class _File:
    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def table(
        self, table: dict[str, Any], command: click.Command, ctx: click.Context, above: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return the defaults of a command and its subcommands."""
        known = {_key(param): param for param in command.get_params(ctx) if _may_be_set(param)}
        below = command if isinstance(command, click.Group) else None
        out: dict[str, Any] = {}
        for key, value in table.items():
            inner = below.get_command(ctx, key) if below is not None and isinstance(value, dict) else None
            if inner is not None:
                out[key] = self.table(value, inner, ctx, (*above, key))
            elif key in known:
                out[known[key].name or key] = self._value(value, known[key], above, key)
            else:
                commands = below.list_commands(ctx) if below is not None else []
                what = f"p2pcast {' '.join(above)}".strip()
                raise self.wrong(
                    above, key, f"{what} knows no {key!r}; it knows {', '.join(sorted([*known, *commands]))}"
                )
        return out

    def _value(self, value: Any, param: click.Parameter, above: tuple[str, ...], key: str) -> Any:
        if isinstance(param, click.Option) and param.is_flag:
            if type(value) is not bool:
                raise self.wrong(above, key, f"{key} takes true or false")
            return value
        if param.multiple:
            if not isinstance(value, list) or not all(_is_plain(item) for item in value):
                raise self.wrong(above, key, f'{key} takes a list, as in {key} = ["…"]')
            return [str(item) for item in value]
        if not _is_plain(value):
            raise self.wrong(above, key, f"{key} takes a text or a number")
        return str(value)

    def wrong(self, above: tuple[str, ...], key: str, why: str) -> UsageError:
        line = self._line(above, key)
        return UsageError(f"{self._path}{'' if line is None else f', line {line}'}: {why}")

    def _line(self, above: tuple[str, ...], key: str) -> int | None:
        """Return the line number of a key or a table header; None if the key is in one of TOML's rarer notations.
        tomllib gives no line numbers.
        """
        table: tuple[str, ...] = ()
        for number, line in enumerate(self._lines, 1):
            if header := _HEADER.fullmatch(line):
                table = tuple(part.strip(" \t\"'") for part in header[1].split("."))
                if table[: len(above) + 1] == (*above, key):
                    return number
            elif table == above and (found := _KEY.match(line)) and found[1].strip("\"'") == key:
                return number
        return None


def _key(param: click.Parameter) -> str:
    """Return the option's command-line name without its leading dashes."""
    long = [name for name in param.opts if name.startswith("--")]
    return long[0].removeprefix("--") if long else param.name or ""


def _may_be_set(param: click.Parameter) -> bool:
    """Whether a file may set the option: not if it exits at once (``--help``), and not ``--config`` itself."""
    return param.expose_value


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)

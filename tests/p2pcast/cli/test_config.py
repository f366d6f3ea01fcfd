"""Options from flags, environment and a TOML file: their precedence, and errors for invalid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from p2pcast.cli import cli
from p2pcast.ground.errors import UsageError


def parsed(command: str, *words: str, config: Path | None = None) -> dict[str, Any]:
    """The parameters that the command would get."""
    group = ["--config", str(config)] if config is not None else []
    with cli.make_context("p2pcast", [*group, command]) as above:
        inner = cli.get_command(above, command)
        assert inner is not None
        with inner.make_context(command, list(words), parent=above) as ctx:
            return ctx.params


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p2pcast.toml"
    path.write_text(
        """
# A host's peer.
log-format = "json"

[join]
hub = "hub.example:7000"
install = ["safetensors:/a b", "exec:./reload now"]
token-file = "/run/token"
keep = 7
max-defer = 2.5
plaintext = true
"from" = 's3://bucket/prefix'

[seed]
listen = ":7001"
uplink = "2gbit"
"""
    )
    return path


def test_a_config_file_sets_options(file: Path) -> None:
    found = parsed("join", config=file)
    assert found["hub"] == ("hub.example", 7000)
    assert found["targets"] == ("safetensors:/a b", "exec:./reload now")
    assert found["token_file"] == Path("/run/token")
    assert (found["keep"], found["max_defer_s"], found["plaintext"], found["mirror"]) == (
        7,
        2.5,
        True,
        "s3://bucket/prefix",
    )
    assert parsed("seed", config=file)["uplink"] == 2e9


def test_a_config_file_sets_the_groups_options(file: Path) -> None:
    with cli.make_context("p2pcast", ["--config", str(file), "join"]) as ctx:
        assert ctx.params["log_format"] == "json"


def test_flags_override_environment_and_environment_overrides_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PCAST_JOIN_KEEP", "8")
    assert parsed("join", config=file)["keep"] == 8
    assert parsed("join", "--keep", "9", config=file)["keep"] == 9
    monkeypatch.setenv("P2PCAST_CONFIG", str(file))
    monkeypatch.delenv("P2PCAST_JOIN_KEEP")
    assert parsed("join")["keep"] == 7


@pytest.mark.parametrize("command", ["seed", "join"])
def test_the_environment_has_every_option_under_its_own_name(command: str) -> None:
    with cli.make_context("p2pcast", [command]) as above:
        inner = cli.get_command(above, command)
        assert inner is not None
        with click.Context(inner, info_name=command, parent=above) as ctx:
            for param in inner.params:
                long = next((name for name in param.opts if name.startswith("--")), None)
                key = long.removeprefix("--") if long is not None else str(param.name)
                expected = f"P2PCAST_{command}_{key}".upper().replace("-", "_")
                auto = f"{ctx.auto_envvar_prefix}_{param.name}".upper() if isinstance(param, click.Option) else None
                named = param.envvar or auto
                assert named == expected


def test_a_version_in_the_environment_is_not_a_question_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exec:` tells commands theirs in P2PCAST_VERSION."""
    monkeypatch.setenv("P2PCAST_VERSION", "0.3")
    assert parsed("seed")["chains"] is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[join]\nkeep = 3\nkept = 4\n", 3, "p2pcast join knows no 'kept'; it knows"),
        ("[join]\nmax_defer = 4\n", 2, "knows no 'max_defer'"),
        ('[seed]\n# keep\n"keep" = 3\n', 3, "p2pcast seed knows no 'keep'"),
        ("keep = 3\n[join]\nkeep = 3\n", 1, "p2pcast knows no 'keep'"),
        ("[joyn]\nkeep = 3\n", 1, "knows no 'joyn'"),
        ("[join.more]\nkeep = 3\n", 1, "knows no 'more'"),
        ("[bench.codec]\nrounds2 = 3\n", 2, "p2pcast bench codec knows no 'rounds2'"),
        ("[join]\nplaintext = 'yes'\n", 2, "takes true or false"),
        ("[join]\n\n  install = 'safetensors:/a'\n", 3, "takes a list"),
        ("[join]\ninstall = [true]\n", 2, "takes a list"),
        ("[join]\nkeep = [1]\n", 2, "takes a text or a number"),
        ("[join]\nkeep = true\n", 2, "takes a text or a number"),
        ("[join]\nkeep.a = 1\n", 2, "takes a text or a number"),
        ("[join]\nhub = 2026-01-01\n", 2, "takes a text or a number"),
        ("config = 'x'\n", 1, "knows no 'config'"),
        ("version = true\n", 1, "knows no 'version'"),
    ],
)
def test_nonsense_is_refused_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refusal:
        parsed("join", config=path)
    assert str(refusal.value).startswith(f"{path}, line {line}: ")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"[join\n", "at line 1"),
        (b"a = 1\na = 2\n", "at line 2"),
        (b"\xff", "not UTF-8"),
        (None, "there is no such file"),
    ],
)
def test_invalid_toml_is_refused(tmp_path: Path, contents: bytes | None, words: str) -> None:
    path = tmp_path / "bad.toml"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(UsageError, match=words):
        parsed("join", config=path)


def test_values_are_checked_as_flags_are(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[join]\nkeep = 0\n")
    with pytest.raises(click.BadParameter, match="0 is not in the range"):
        parsed("join", config=path)

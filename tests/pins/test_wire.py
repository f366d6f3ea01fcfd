"""Numbers, names and texts that other releases and signatures rely on. Whole frames are in tests/golden."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import places
from pinned import check, sources


def test_message_types_have_the_numbers_that_were_pinned() -> None:
    messages = places.messages
    check(
        "messages",
        {
            t.name: {
                "number": int(t),
                "longest": messages.MAX_BODY[t],
                "keys": places.message_keys(t, required=True),
                "keys that may be missing": places.message_keys(t, required=False),
                "signed": t in messages.SIGNED,
                "plain": t in messages.PLAIN,
            }
            for t in messages.Type
        },
    )


def test_transitions_match_the_pin() -> None:
    """State → which side may say what there → the next state."""
    out: dict[str, dict[str, str]] = {}
    for (state, side, kind), to in places.TRANSITIONS.items():
        out.setdefault(state.name, {})[f"{side.value}: {kind.name}"] = to.name
    check("transitions", out)


def test_protocols_purposes_and_labels_match_the_pin() -> None:
    roles = places.roles
    tables = {"DIALERS": roles.DIALERS, "LISTENERS": roles.LISTENERS}
    check(
        "protocol",
        {
            "spoken": [places.SPOKEN.least, places.SPOKEN.greatest],
            "header": places.HEADER.format,
            "labels": [places.DIALER_LABEL.decode(), places.LISTENER_LABEL.decode()],
            "roles that a token buys": list(roles.BOUGHT),
            "purposes": {t: {purpose: sorted(who) for purpose, who in table.items()} for t, table in tables.items()},
            "enrolment": roles.ENROL,
            "kinds of artifacts": list(places.KINDS),
        },
    )


def test_errors_have_the_codes_that_were_pinned() -> None:
    found = inspect.getmembers(places.errors, lambda e: inspect.isclass(e) and issubclass(e, Exception))
    check(
        "errors",
        {
            name: {"exit": error.exit_code, "wire": error.wire_code, "is a": [b.__name__ for b in error.__bases__]}
            for name, error in found
        },
    )


def constants(text: str) -> list[Any]:
    return [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]


def test_magic_numbers_and_signature_domains_match_the_pin() -> None:
    """Every constant of bytes in source that names p2pcast: files begin with some, others are signed."""
    found = {value.decode("latin-1") for _, text in sources() for value in constants(text) if isinstance(value, bytes)}
    check("byte_texts", sorted(text for text in found if text.startswith("p2p") and len(text) > 3))


def test_environment_variables_match_the_pin() -> None:
    """Variables named in the source. Variables of options are pinned with the commands."""
    found: set[str] = set()
    for _, text in sources():
        found |= set(re.findall(r"\bP2PCAST_[A-Z][A-Z_]*[A-Z]\b", text))
        for node in ast.walk(ast.parse(text)):
            found |= set(asked(node))
    check("environment", sorted(found))


def asked(node: ast.AST) -> list[str]:
    """The name in ``os.environ["NAME"]``, ``os.environ.get("NAME")`` or ``os.getenv("NAME")``."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        key = node.slice
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "os.environ.get",
        "os.environ.setdefault",
        "os.getenv",
    ):
        key = node.args[0]
    return [key.value] if isinstance(key, ast.Constant) and isinstance(key.value, str) else []


def test_named_loggers_match_the_pin() -> None:
    """Lines of --log-format json carry them. Loggers that are named for their module are left out."""
    found: set[str] = set()
    for _, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger" and node.args:
                found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    check("loggers", sorted(found))

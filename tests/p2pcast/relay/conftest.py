"""Artifacts with random payloads, made by the real packer, and nodes that are validated after every step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream

sys.path.append(str(Path(__file__).parent))  # artifact_maker

from artifact_maker import Maker


@pytest.fixture(scope="session")
def maker() -> type[Maker]:
    return Maker


STEPS: dict[type, tuple[str, ...]] = {
    Node: (
        "abort", "add_batch", "add_layout", "add_local", "add_partial", "add_piece", "add_stored", "confirm", "forget",
        "forward", "give_up", "open", "seal", "_on_stored",
    ),
    Upstream: (
        "expect", "give_up_on", "on_link_closed", "on_link_event", "on_link_read", "skip", "start", "want",
        "want_newer",
    ),
    Downstream: ("on_link_closed", "on_link_event", "on_link_writable"),
}  # fmt: skip
"""Every method by which the world acts on a node."""


def validate(node: Node) -> None:
    """Raises AssertionError that names the first broken invariant."""
    node.validate()
    for holding in node.holdings.values():
        source = holding.source
        if isinstance(source, Upstream):
            assert source in node.upstreams, f"{holding.open.version} waits for a parent that is gone"


class Steps:
    """Validates a node after each of its steps; a step inside a step belongs to the outer one."""

    def __init__(self) -> None:
        self.count = 0
        self._depth = 0

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return method(this, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.count += 1
                    validate(this if isinstance(this, Node) else this.node)

        return step


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Validates every node after every step of every test in this folder."""
    found = Steps()
    for kind, names in STEPS.items():
        for name in names:
            monkeypatch.setattr(kind, name, found.watched(getattr(kind, name)))
    return found

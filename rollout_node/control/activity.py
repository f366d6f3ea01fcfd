"""The peer's state and error, as /status and reports show them."""

from __future__ import annotations

from collections.abc import Callable


class Activity:
    """``on_change`` is called when the state changes: the hub gets a report at once."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.state = "joining"
        """One word of those in docs/reference/http.md."""
        self.error: str | None = None
        """Why the last version was refused; None after the next one was staged."""
        self.draining = False
        """The peer is ending and hands over its children."""
        self._on_change = on_change

    @property
    def shown(self) -> str:
        return "draining" if self.draining else self.state

    def enter(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._on_change()

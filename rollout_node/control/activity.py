"""The peer's state and error, as shown by /status and reports."""

from __future__ import annotations

from collections.abc import Callable


class Activity:
    """``on_change`` is called when the state changes, so that a report is sent to the hub at once."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.state = "joining"
        """One of the words listed in docs/reference/http.md."""
        self.error: str | None = None
        """Why the last version was refused; None once the next one has been staged."""
        self.draining = False
        """Whether the peer is shutting down and handing over its children."""
        self._on_change = on_change

    @property
    def shown(self) -> str:
        return "draining" if self.draining else self.state

    def enter(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._on_change()

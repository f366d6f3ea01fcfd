"""A p2pcast process that turns on its children when it is told to: ``python -m netem.hostile join …``, then a signal.

SIGUSR1: it goes on taking bytes and saying that it is alive, and sends no piece any more. SIGUSR2: every piece that it sends is garbage. SIGHUP: it is
honest again, and sends what it has held back. In all else it is what the command line says, an ordinary peer or hub.
"""

from __future__ import annotations

import signal

from p2pcast.cli import main
from p2pcast.relay.child import Child
from p2pcast.relay.downstream import Downstream
from p2pcast.transport.stripe import Stripe

MUTE, GARBAGE, HONEST = signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
HEADER_BYTES = 12
_OTHER = bytes(value ^ 0x55 for value in range(256))


class Mood:
    now = HONEST


def turn() -> None:
    """Have every ``Downstream`` of this process follow the mood."""
    honest = Downstream._gather
    waiting: set[Downstream] = set()

    def gather(self: Downstream, child: Child, stripe: Stripe, parts: list[bytes | memoryview]) -> bool:
        if Mood.now == MUTE:
            waiting.add(self)
            return False
        more = honest(self, child, stripe, parts)
        if Mood.now == GARBAGE:
            for at in range(1, len(parts)):
                if len(parts[at - 1]) == HEADER_BYTES:
                    parts[at] = bytes(parts[at]).translate(_OTHER)
        return more

    def change(number: int, _: object) -> None:
        Mood.now = signal.Signals(number)
        while waiting:
            downstream = waiting.pop()
            downstream._loop.call_soon_threadsafe(downstream.pump)

    Downstream._gather = gather  # type: ignore[method-assign]
    for number in (MUTE, GARBAGE, HONEST):
        signal.signal(number, change)


if __name__ == "__main__":
    turn()
    main()

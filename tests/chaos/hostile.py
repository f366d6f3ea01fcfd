"""A p2pcast process that turns against its children on a signal: ``python tests/chaos/hostile.py join …``.

SIGUSR1: it accepts bytes and sends keepalives, and sends no piece. SIGUSR2: it sends garbage in place of every piece.
SIGHUP: it is honest again, and sends the delayed pieces. Apart from that it is the peer or hub of the command line.
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


class Behaviour:
    now = HONEST


def install_hooks() -> None:
    """Replace ``Downstream._frames_for`` of this process, and install the signal handlers."""
    honest = Downstream._frames_for
    waiting: set[Downstream] = set()

    def gather(self: Downstream, child: Child, stripe: Stripe, parts: list[bytes | memoryview]) -> bool:
        if Behaviour.now == MUTE:
            waiting.add(self)
            return False
        more = honest(self, child, stripe, parts)
        if Behaviour.now == GARBAGE:
            for at in range(1, len(parts)):
                if len(parts[at - 1]) == HEADER_BYTES:
                    parts[at] = bytes(parts[at]).translate(_OTHER)
        return more

    def change(number: int, _: object) -> None:
        Behaviour.now = signal.Signals(number)
        while waiting:
            downstream = waiting.pop()
            downstream._loop.call_soon_threadsafe(downstream.pump)

    Downstream._frames_for = gather  # type: ignore[method-assign]
    for number in (MUTE, GARBAGE, HONEST):
        signal.signal(number, change)


if __name__ == "__main__":
    install_hooks()
    main()

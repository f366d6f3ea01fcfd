"""Random numbers from the operating system, for jitter and for the order of requests.

Promise: the state of the module ``random`` is neither read nor moved. It belongs to the program around this code. A
trainer seeds it to repeat a run. An engine seeds it alike on every machine, which would make all of them retry at the
same moments.
"""

from __future__ import annotations

from random import SystemRandom

_SOURCE = SystemRandom()

uniform = _SOURCE.uniform
"""A random number between two limits."""

fraction = _SOURCE.random
"""A random number in [0, 1)."""

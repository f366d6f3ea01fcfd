"""Random numbers from the operating system, for jitter and for the order of requests.

Guarantee: the state of the ``random`` module is neither read nor changed, since it belongs to the surrounding program.
A trainer seeds it to make a run reproducible. An engine uses the same seed on every machine, which would make all
machines retry at the same moments.
"""

from __future__ import annotations

from random import SystemRandom

_SOURCE = SystemRandom()

uniform = _SOURCE.uniform
"""A random number between two limits."""

fraction = _SOURCE.random
"""A random number in [0, 1)."""

"""A real hub, peers and a small Qwen3, as in the tests of the examples."""

from __future__ import annotations

from tests.examples.test_examples import stage

__all__ = ["stage"]

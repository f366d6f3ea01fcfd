"""Policies for an engine's KV cache when it switches to new weights (``--kv``).

| policy | running requests | cached prefixes of earlier requests |
|---|---|---|
| ``recompute`` | compute their keys and values again with the new weights | are dropped |
| ``salt`` | keep keys and values of the old weights | are found only by requests with the same ``cache_salt`` |
| ``keep`` | keep keys and values of the old weights | are found by every request |

With ``recompute``, tokens after a switch depend only on the new weights. ``salt`` is for clients that send
``cache_salt=branch.step`` of the version that they intend to use: prefixes of older weights then never match.

Only ``recompute`` has an effect at the switch itself: the engine's caches are emptied, and the tokens to recompute are
counted. For the engine, ``salt`` and ``keep`` are the same policy; they differ in what clients send.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

KvPolicy = Literal["recompute", "salt", "keep"]
KV_POLICIES: Final[tuple[KvPolicy, ...]] = get_args(KvPolicy)

SpanKv = Literal[KvPolicy, "drain"]
"""The policy as peers report it and as a result's spans state it. ``drain``: the engine switched without running
requests and dropped all cached prefixes (``--commit-safe-point drain``, which needs ``recompute``).
"""
SPAN_KVS: Final[tuple[SpanKv, ...]] = get_args(SpanKv)

KV_OF_ONE_VERSION: Final[tuple[SpanKv, ...]] = ("recompute", "salt", "drain")
"""Policies under which a single version computed everything that a span's tokens were sampled from."""


def recomputes(policy: KvPolicy) -> bool:
    """Whether a switch empties the engine's caches and counts the tokens to recompute."""
    return policy == "recompute"

"""Policies for the KV cache of an engine at a switch to new weights (``--kv``).

| policy | running requests | cached prefixes of earlier requests |
|---|---|---|
| ``recompute`` | compute their keys and values again with the new weights | are dropped |
| ``salt`` | keep keys and values of the old weights | are found only by requests with the same ``cache_salt`` |
| ``keep`` | keep keys and values of the old weights | are found by every request |

With ``recompute``, tokens after a switch depend on the new weights alone. ``salt`` is for clients that send
``cache_salt=branch.step`` of the version that they mean to use: prefixes of older weights then never match.

Only ``recompute`` has an effect at the switch itself: the engine's caches are emptied, and the tokens to be recomputed
are counted. ``salt`` and ``keep`` are one policy for the engine. They differ in what clients send.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

KvPolicy = Literal["recompute", "salt", "keep"]
KV_POLICIES: Final[tuple[KvPolicy, ...]] = get_args(KvPolicy)

SpanKv = Literal[KvPolicy, "drain"]
"""The policy as peers report it and as spans of a result state it. ``drain``: the engine switched without running
requests and dropped all cached prefixes (``--commit-safe-point drain``, which needs ``recompute``).
"""
SPAN_KVS: Final[tuple[SpanKv, ...]] = get_args(SpanKv)

KV_OF_ONE_VERSION: Final[tuple[SpanKv, ...]] = ("recompute", "salt", "drain")
"""Policies under which one version computed all that a token of one span was sampled from."""


def recomputes(policy: KvPolicy) -> bool:
    """Whether a switch empties the engine's caches and counts the tokens to be recomputed."""
    return policy == "recompute"

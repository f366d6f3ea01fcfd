"""Relaying: verify each piece, then forward it, while pieces are stored and decoded elsewhere.

``node`` composes the rest. ``holding_state``, ``piece_set``, ``send_schedule``, ``pull_schedule``, ``liveness``,
``active_stripes``, ``pacing``, ``pull_throttle``, ``child_lag``, ``artifact_path`` and ``artifact_excerpt`` are pure.
"""

"""Relaying: each piece is verified, then forwarded, while other code stores and decodes pieces.

``node`` combines the other modules. ``holding_state``, ``piece_set``, ``send_schedule``, ``pull_schedule``,
``liveness``, ``active_stripes``, ``pacing``, ``pull_throttle``, ``child_lag``, ``artifact_path`` and
``artifact_excerpt`` are pure.
"""

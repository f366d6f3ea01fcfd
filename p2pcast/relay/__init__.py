"""Relaying: each piece is verified, then forwarded, while other code stores and decodes pieces.

``node`` combines the modules. ``holding_state``, ``send_schedule``, ``pull_schedule``, ``parent_watch``,
``active_stripes``, ``pacing``, ``pull_throttle``, ``child_lag``, ``artifact_path`` and ``artifact_excerpt`` are pure.
"""

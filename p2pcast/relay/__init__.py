"""Relaying: verify, then forward, while pieces are stored and decoded elsewhere.

``pieces``, ``feed`` and ``liveness`` decide and are pure; ``node`` runs them.
"""

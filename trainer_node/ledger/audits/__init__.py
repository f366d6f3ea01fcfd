"""Audits of what workers state: log-probabilities, and the rewards that a run trusts."""

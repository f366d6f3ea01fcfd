"""Probes: whether the weights of each engine are those that the learner has published."""

"""Staging: the shadow, at one version of the run after the other."""

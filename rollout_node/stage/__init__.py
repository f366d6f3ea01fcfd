"""Staging: moving the shadow from one version of the run to the next."""

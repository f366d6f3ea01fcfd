"""Decides when engines switch to a version."""

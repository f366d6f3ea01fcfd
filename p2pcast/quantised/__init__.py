"""Quantised states: a version's weights in the form that a quantised engine loads, computed only from the version."""

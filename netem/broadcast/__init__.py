"""Broadcast times of p2pcast and rivals beside the limits of the links, each on its own emulated network in the same
run.
"""

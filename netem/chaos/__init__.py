"""Faults, kills, crashes and attacks on a fleet, and long runs of them."""

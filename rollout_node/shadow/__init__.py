"""A peer's whole state in memory, and the versions that were applied to it."""

"""A peer's whole state in memory, and the versions applied to it."""

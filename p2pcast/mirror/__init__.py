"""A run's copy in an object store: what its names are, what goes up or away next, and the store itself (docs/mirror.md)."""

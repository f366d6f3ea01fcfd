"""Versions that a trainer's ranks send: parts of cells, one connection for each rank."""

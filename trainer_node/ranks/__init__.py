"""Receives versions from a trainer's ranks: parts of cells, over one connection per rank."""

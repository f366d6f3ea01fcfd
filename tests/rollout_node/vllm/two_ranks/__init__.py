"""A package, so that the engine of its fixtures ends with the last test of this folder."""

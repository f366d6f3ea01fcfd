"""Modules that import nothing else from p2pcast: errors, limits, versions, waits and texts."""

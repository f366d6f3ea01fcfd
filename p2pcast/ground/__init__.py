"""Parts that import nothing else of p2pcast: errors, limits, versions, waits and texts."""

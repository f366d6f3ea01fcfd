"""A node's files on disk, crash-safe by construction."""

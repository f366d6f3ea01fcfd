"""Files on disk: atomic writes, private folders, append-only logs and crash-safe file system changes."""

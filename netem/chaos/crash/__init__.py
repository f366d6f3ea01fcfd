"""Models of a disk after a crash, and processes that crash at a chosen step."""

"""Emulated networks: by this kernel, by user-mode Linux, or by processes on loopback."""

"""Decides which nodes the hub admits: tokens, certificates, names, evictions."""

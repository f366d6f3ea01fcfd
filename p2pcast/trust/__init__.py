"""Who may do what in a run: its authority, certificates with roles, join tokens, evictions, and the TLS contexts made of them (docs/threats.md)."""

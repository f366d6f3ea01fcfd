"""Authentication and permissions in a run: certificate authority, certificates with roles, join tokens, evictions, and
TLS contexts (docs/design/security.md).
"""

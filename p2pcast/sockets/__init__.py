"""Listening sockets: TLS, and which connection is admitted."""

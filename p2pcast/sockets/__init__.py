"""Listening sockets: their addresses, TLS, and the admission of connections."""

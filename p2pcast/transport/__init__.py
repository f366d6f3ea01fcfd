"""Sockets for the wire protocol: stripes, links of stripes, dialling and listening. TLS contexts are accepted everywhere."""

"""Connections for the wire protocol: stripes (one TCP connection each), links made of stripes, dialling and listening,
with or without TLS.
"""

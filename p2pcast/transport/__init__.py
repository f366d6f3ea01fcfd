"""Connections for the wire protocol: stripes (one TCP connection each), links of stripes, dialling and listening, with
or without TLS.
"""

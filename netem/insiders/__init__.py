"""Nodes with a certificate that mean no good: well-framed messages with values and in orders that no honest node would choose, at every state of a connection."""

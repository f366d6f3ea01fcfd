"""The wire protocol, without I/O: frames, messages, states, handshake. Specification: docs/wire-protocol.md."""

"""The wire protocol, without I/O: frames, messages, states, handshake. Specification: docs/formats/wire-protocol.md."""

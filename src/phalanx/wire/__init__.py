"""The content of the wire, without I/O: frames, control messages, the handshake."""

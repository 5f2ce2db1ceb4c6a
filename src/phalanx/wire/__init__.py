"""What crosses the wire, and nothing about how: frames, control messages, the handshake."""

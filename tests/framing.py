"""Messages as the bytes that a rank sends for them."""

from __future__ import annotations

from phalanx.wire.frame import MAX_PAYLOAD, Channel, pack_header


def framed(channel: Channel, content: bytes | memoryview, fingerprint: int = 0) -> bytes:
    """A message, cut into frames. At least one, also if it is empty."""
    stream, total = bytearray(), len(content)
    for start in range(0, total or 1, MAX_PAYLOAD):
        part = content[start : start + MAX_PAYLOAD]
        stream += pack_header(
            channel, fingerprint=fingerprint, length=len(part), total=total, offset=start
        )
        stream += part
    return bytes(stream)

"""How operations are named in messages."""

from __future__ import annotations


def describe(sequence: int, name: str, signature: str) -> str:
    """`all_reduce #41 (float32 [32, 32], sum, ring)`."""
    details = f" ({signature})" if signature else ""
    return f"{name} #{sequence}{details}"

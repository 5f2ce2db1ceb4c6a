"""How operations are named in messages."""

from __future__ import annotations

from phalanx.backends.engine.caller import Site


def describe(name: str, sequence: int, signature: str, suffix: str, site: Site) -> str:
    """`all_reduce #41 (float32 [32], sum, ring) in the group of ranks [0, 2] at train.py:57`."""
    details = f" ({signature})" if signature else ""
    where = f" at {site}" if site.line else ""
    return f"{name} #{sequence}{details}{suffix}{where}"

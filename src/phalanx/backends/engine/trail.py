"""A trail: all that a rank has been asked to do together with a group, as one word.

    trail after #n  =  (trail before it + fingerprint of #n + 1) * odd    (mod 2^64)

Ranks with equal trails have issued the same collectives in the same order; others have parted, now
or long ago. One step is a bijection: two that differ in the last collective alone never have equal
trails. Of any others that differ, one pair in some 2^60 has.
"""

from __future__ import annotations

_WORD = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # spreads numbers over a word (Knuth 1998, multiplicative hashing)

START = 0


def further(trail: int, fingerprint: int) -> int:
    """The trail after one more collective."""
    return (trail + fingerprint + 1) * _ODD & _WORD

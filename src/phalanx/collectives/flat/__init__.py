"""Collectives of ranks that have memory in common: nothing is sent, everyone reads from everyone.

forms      what each collective is: who gives what to whom, whether it is folded, and passed on
flat       how it is done: show, meet, read
folding    contributions in rank order become one
"""

from phalanx.collectives.flat.flat import FLAT, Flat

__all__ = ["FLAT", "Flat"]

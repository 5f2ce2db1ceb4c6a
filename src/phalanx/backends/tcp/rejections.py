"""Who was turned away at a door: told in full at first, then counted.

A port scanner must not fill a disk, nor hide the rank with the wrong token between its lines. So
callers that said which rank they are have lines of their own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.backends.tcp.mesh import Mesh

log = logging.getLogger("phalanx")

TOLD_IN_FULL = 10  # lines of each kind; then one for the 10th, 100th, 1000th ...


class Rejections:
    """Counts, logs, and keeps what a timeout quotes in `mesh.last_rejection`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.strangers = 0
        self.ranks = 0
        self._last_rank = ""

    def add(self, what: str, *, rank: int | None) -> None:
        """Someone was refused who said that it is `rank` (None: said nothing of the kind)."""
        if rank is None:
            self.strangers += 1
            number, kind = self.strangers, "strangers"
            before = f"; before that {self._last_rank}" if self._last_rank else ""
        else:
            self.ranks += 1
            number, kind = self.ranks, "callers that said which rank they are"
            before, self._last_rank = "", what
        if number <= TOLD_IN_FULL:
            self.mesh.turned_away(what)
        elif _is_power_of_ten(number):
            log.warning(
                "rank %d turned away %d %s so far, the last of them %s",
                self.mesh.rank,
                number,
                kind,
                what,
            )
        self.mesh.last_rejection = what + before

    def total(self) -> None:
        """The door closes: how many there were, if not each of them was told."""
        if max(self.strangers, self.ranks) > TOLD_IN_FULL:
            log.warning(
                "rank %d turned away %d strangers and %d callers that said which rank they are "
                "while its job formed",
                self.mesh.rank,
                self.strangers,
                self.ranks,
            )


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"

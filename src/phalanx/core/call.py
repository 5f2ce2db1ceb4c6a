"""A call: a rank's operation, the line of the program that asked for it, and its ranks."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import InvalidWorldSizeError

if TYPE_CHECKING:
    from phalanx.core.steps import Step

WORLD_ID = 0  # of the group of all ranks
# The code between the user's line and here: packages, and torch's wrappers of functions.
_INSIDE = ("phalanx.", "torch.", "contextlib", "typing_extensions", "warnings")
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_OPERATIONS = tuple(f"{_PACKAGE}{part}{os.sep}" for part in ("collectives", "core"))


class CallSite(NamedTuple):
    """A line of a program: an instruction of it, whose line is looked up when it is asked for.

    Python finds a line by reading the table of its function from the beginning, which takes longer
    than a small collective if functions are long.

    code         the function of the program that has the line
    instruction  the offset of its bytes in there
    called       the function that it calls
    """

    code: CodeType | None
    instruction: int
    called: CodeType | None = None

    @property
    def line(self) -> int:
        """The line, from 1 on; 0 if it is not known."""
        for first, last, line in self.code.co_lines() if self.code is not None else ():
            if first <= self.instruction < last:
                return line or 0
        return 0

    @property
    def function(self) -> str:
        """The public function of this package that the line calls, if that is no operation itself.

        For example `save_checkpoint`; else "".
        """
        if self.called is None or self.called.co_name.startswith("_"):
            return ""
        file = self.called.co_filename
        larger = file.startswith(_PACKAGE) and not file.startswith(_OPERATIONS)
        return self.called.co_name if larger else ""

    def __str__(self) -> str:
        line = self.line
        if self.code is None or not line:
            return "an unknown line"
        return f"{os.path.basename(self.code.co_filename)}:{line}"


UNKNOWN_SITE = CallSite(None, 0)


def call_site() -> CallSite:
    """Return the innermost line on the stack that is neither of Phalanx nor of torch.

    For a gradient that a hook sends during `loss.backward()`, that is the line of the `backward()`.
    """
    frame: FrameType | None = sys._getframe(3)  # the two innermost are of `Backend`
    called = None
    while frame is not None:
        code = frame.f_code
        if not _is_inside(frame.f_globals.get("__name__")):
            return CallSite(code, frame.f_lasti, called)
        called, frame = code, frame.f_back
    return UNKNOWN_SITE


@cache
def _is_inside(module: str | None) -> bool:
    return module is not None and module.startswith(_INSIDE)


@dataclass(slots=True, eq=False)
class Call:
    """An operation of a rank, for agreement, messages, errors and traces. It holds no tensor.

    sequence      its number: among the group's collectives, or the messages to or from a peer
    signature     its description, for messages; `fingerprint` is its hash on the wire
    suffix        its group, if it is not that of all ranks
    site          the user's line that asked for it
    started, ended  on the engine's clock
    rolling_hash  of a collective: of all that the group was asked to do up to it (checker.py)
    step          of a collective: the step that its caller is carrying out itself (group.py)
    """

    name: str
    sequence: int
    signature: str
    suffix: str
    site: CallSite
    started: float
    timeout: float
    fingerprint: int = 0
    rolling_hash: int = 0
    ended: float = 0.0
    failed: bool = False
    step: Step | None = None

    def describe(self) -> str:
        """`all_reduce #41 (float32 [32], sum) in the group of ranks [0, 2] at train.py:57`.

        If the line calls a larger part of the library: `all_gather #7 in save_checkpoint() at ...`.
        """
        details = f" ({self.signature})" if self.signature else ""
        function = self.site.function
        inside = f" in {function}()" if function else ""
        where = f" at {self.site}" if self.site.line else ""
        return f"{self.name} #{self.sequence}{details}{self.suffix}{inside}{where}"


def called_function(description: str) -> str:
    """Return the public function that a described call is in, `save_checkpoint`; "" if none."""
    found = re.search(r" in (\w+)\(\)(?: at |$)", description)
    return found[1] if found else ""


def check_world_size(size: int) -> int:
    """Return it as an int. TypeError unless it is one, `InvalidWorldSizeError` for less than 1."""
    number = whole_number(size, "world_size")
    if number < 1:
        raise InvalidWorldSizeError(f"a group needs at least one rank, not {number}")
    return number


def whole_number(number: int, what: str) -> int:
    """Return it as an int. TypeError, which names the argument, unless it is one."""
    try:
        return index(number)
    except TypeError:
        raise TypeError(f"{what} is a whole number, not {number!r}") from None


def check_timeout(timeout: float, what: str = "timeout") -> float:
    """Return the timeout as a float. Raises ValueError unless it is positive, in seconds."""
    if not hasattr(timeout, "__float__"):
        raise TypeError(f"{what} is a number of seconds, not {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"{what} must be a positive number of seconds, not {timeout!r}")
    return float(timeout)


class Members:
    """The ranks of a group, and their names in messages.

    ranks      its members as global ranks; a member's index here is its rank in the group
    to_local   global rank -> rank in the group
    here       this rank, as a global rank; `rank` is the same in the group's numbers, and `name`
               both for messages
    """

    def __init__(self, ident: int, ranks: tuple[int, ...], here: int) -> None:
        self.id = ident
        self.ranks = ranks
        self.here = here
        self.to_local = {rank: place for place, rank in enumerate(ranks)}
        self.rank = self.to_local[here]
        self.size = len(ranks)
        self.name = self.name_of(self.rank)
        self.suffix = "" if ident == WORLD_ID else f" in the group of ranks {list(ranks)}"

    def name_of(self, local: int) -> str:
        """Return a member for a message: its rank here, and in the whole job if that differs."""
        rank = self.ranks[local]
        return str(local) if rank == local else f"{local} (rank {rank} of the job)"

    def name_of_global(self, rank: int) -> str:
        """Return the same for a global rank, which need not be a member."""
        local = self.to_local.get(rank)
        return f"{rank} of the job" if local is None else self.name_of(local)

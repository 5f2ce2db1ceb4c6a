"""The forms of the collectives, as shared memory sees them.

Every member gives a tensor, or one of them, the root, does. Where it is *sliced*, slice j is for
member j; else it is for all. What is taken is *folded* to one, or *joined*, or it is the root's. In
some, each folds a slice, and it is then *passed on* to all, or to the root.

    collective       given by   sliced   taken by    then
    all_reduce       all        yes      all: fold   passed on to all
    reduce           all        yes      all: fold   passed on to the root
    reduce_scatter   all        yes      all: fold
    all_gather       all        no       all: join
    gather           all        no       root: join
    broadcast        root       no       all
    scatter          root       yes      all
    all_to_all       all        yes      all: join
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Who(enum.Enum):
    """Which members."""

    ALL = "all"
    ROOT = "root"

    def includes(self, place: int, root: int) -> bool:
        """Whether it means this one."""
        return self is Who.ALL or place == root


class Form(NamedTuple):
    """One row of the table."""

    givers: Who
    takers: Who
    sliced: bool
    folded: bool = False
    joined: bool = False
    passed_on: Who | None = None


# fmt: off
FORMS: Mapping[str, Form] = MappingProxyType({
    #                      givers    takers    sliced
    "all_reduce":     Form(Who.ALL,  Who.ALL,  True,  folded=True, passed_on=Who.ALL),
    "reduce":         Form(Who.ALL,  Who.ALL,  True,  folded=True, passed_on=Who.ROOT),
    "reduce_scatter": Form(Who.ALL,  Who.ALL,  True,  folded=True),
    "all_gather":     Form(Who.ALL,  Who.ALL,  False, joined=True),
    "gather":         Form(Who.ALL,  Who.ROOT, False, joined=True),
    "broadcast":      Form(Who.ROOT, Who.ALL,  False),
    "scatter":        Form(Who.ROOT, Who.ALL,  True),
    "all_to_all":     Form(Who.ALL,  Who.ALL,  True,  joined=True),
})
# fmt: on

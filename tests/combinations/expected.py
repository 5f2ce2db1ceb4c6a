"""What is refused, and in which words. Everything else has to be right.

What torch refuses in one process is no cell of the table, whatever the wrapper: `TORCH_REFUSES`;
nor is what it gets wrong there: `TORCH_IS_WRONG`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from torch import __version__

if TYPE_CHECKING:
    from feature import Feature
    from wrappers import Way


class Refusal(NamedTuple):
    """What is refused.

    ways     patterns of names, with spaces between them; `?` stands for a space in a name
    feature  its name
    beside   another one, without which the feature is right
    text     a regular expression of the error's text, the same on every rank
    ends     the group is over after it: ranks have done different things, and noticed
    always   False: right, or refused, as the other features have it
    """

    ways: str
    feature: str
    text: str
    ends: bool = False
    beside: str = ""
    always: bool = True


FSDP = "FULL_SHARD* SHARD_GRAD_OP NO_SHARD hybrid *x?FULL_SHARD"
STAGES = "1F1B* ZB-H1*"
REFUSED = [
    Refusal("LocalSGD* DiLoCo", "unfreezing", "frozen when the module was wrapped: wrap it after"),
    Refusal("DDP* *x?DDP", "optimizers in hooks", "an optimizer steps on"),
    # What is never written leaves the end of the first step to be seen inside the next backward
    # pass, before which a sync may be due.
    Refusal(
        "LocalSGD* DiLoCo",
        "optimizers in hooks",
        "a sync is due",
        beside="unused parameters",
        always=False,
    ),
    # torch's own words, as of fully_shard: shards are in no graph.
    Refusal(FSDP, "autograd.grad for parameters", "appears to not have been used in the graph"),
    Refusal(FSDP, "unused on one rank", "pass a unit= around it that every rank calls", ends=True),
    Refusal("DDP* LocalSGD* DiLoCo 1F1B?x?DDP", "meta device", "was given one on meta"),
    Refusal(
        "1F1B ZB-H1 1F1B?x?tensor",
        "meta device",
        "is on the meta device, and this rank trains stage",
    ),
    Refusal("1F1B ZB-H1 1F1B?x?tensor", "shared parameters", "are one parameter, and a pipeline"),
    Refusal(
        "ZB-H1?x?FULL_SHARD",
        "unused in a group",
        r"called \w+ .*FSDP.* called \w+ .*FSDP",
        ends=True,
    ),
    Refusal("1F1B?x?DDP", "shared parameters", "another DDP averages the gradients of"),
    Refusal("1F1B?x?DDP", "unused in a group", "DDP's pass.*DDP's pass", ends=True),
    Refusal("1F1B?x?DDP", "unused on one rank", "DDP's pass.*DDP's pass", ends=True),
    Refusal("ZB-H1?x?FULL_SHARD", "shared parameters", "is in another FSDP already"),
]

LAYER_COMPILED = "Module.compile of a layer"

# Features that torch does not take together in one process, and a part of its words.
TORCH_REFUSES: dict[frozenset[str], str] = {
    frozenset(("clip_grad_norm_", "sparse gradients")): "SparseCPU",
    frozenset(("clip_grad_value_", "sparse gradients")): "SparseCPU",
    frozenset(("clip_grad_value_", "complex parameters")): "not supported for complex",
    frozenset(("gradient penalty", "torch.compile")): "double backward",
    frozenset(("gradient penalty", LAYER_COMPILED)): "double backward",
    frozenset(("autograd.grad for parameters", "torch.compile")): "double backward",
}

# In torch 2.11 a layer that was compiled while it was frozen may get no gradient when it is trained
# (its third step runs the graph of the first), and checkpoints do not compile for a second size of
# batches ("referenced nonexistent value"). 2.13 does both.
TORCH_IS_WRONG: list[frozenset[str]] = []
if tuple(int(number) for number in __version__.split(".")[:2]) < (2, 13):
    TORCH_IS_WRONG += [
        frozenset(("unfreezing", "torch.compile")),
        frozenset(("unfreezing", LAYER_COMPILED)),
        frozenset(("checkpointing", "torch.compile")),
    ]


def torch_refuses(features: Iterable[Feature]) -> bool:
    """Whether one process refuses some of these features together, or gets them wrong."""
    names = {one.name for one in features}
    return any(some <= names for some in (*TORCH_REFUSES, *TORCH_IS_WRONG))


@cache
def _rows(way: str) -> list[Refusal]:
    return [
        row for row in REFUSED if any(fnmatchcase(way, pattern) for pattern in row.ways.split())
    ]


def refusal_of(way: Way, features: Sequence[Feature]) -> Refusal | None:
    """The refusal that one of these features meets, if there is one."""
    names = {one.name for one in features}
    for row in _rows(way.name):
        if row.feature in names and (not row.beside or row.beside in names):
            return row
    return None

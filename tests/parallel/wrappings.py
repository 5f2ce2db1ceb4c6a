"""What most promises about DDP and FSDP are tried on: each wrapper, on each kind of backend.

A test that is marked `every_wrapping` takes `wrap`, which stands for one row of the table: it wraps
a model, and runs its ranks. What ranks have of a gradient is joined, so that a test compares whole
gradients with those of a naive DDP, whatever the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
from clusters import Cluster
from ddp_runs import Gradients, assert_close, naive_gradients, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import DDP, FSDP, Backend, ShardingStrategy

Build = Callable[[], nn.Module]
Pass = Callable[[Any, int], object]  # of a model, on a rank
Body = Callable[[nn.Module, Backend], Any]


class Wrapping(NamedTuple):
    """DDP, or FSDP with a strategy; the options that it is given; and where its ranks are."""

    kind: type[DDP] | type[FSDP]
    options: dict[str, Any]
    cluster: Cluster

    def __call__(
        self, model: nn.Module, backend: Backend, *, ddp: Any = None, fsdp: Any = None
    ) -> Any:
        """The model, wrapped, with options that only one kind takes."""
        more = ddp if self.kind is DDP else fsdp
        return self.kind(model, backend, **{**self.options, **(more or {})})

    def __str__(self) -> str:
        how = "-".join(getattr(value, "__name__", str(value)) for value in self.options.values())
        return "-".join(filter(None, [self.kind.__name__, how, self.cluster.name]))

    def on_ranks(self, ranks: int, build: Build, body: Body) -> list[Any]:
        """What `body(model, backend)` returns on every rank."""
        return on_ranks(self.cluster, ranks, build, body)

    def state(self, wrapped: Any) -> dict[str, Tensor]:
        """The whole model's parameters and buffers; a copy."""
        return values(wrapped.module) if self.kind is DDP else wrapped.full_state_dict()

    def gradients(
        self,
        ranks: int,
        build: Build,
        *passes: Pass,
        alternate: bool = False,
        ddp: Any = None,
        fsdp: Any = None,
    ) -> list[Gradients]:
        """The whole gradients after each of these passes, which begin without any.

        alternate   before every second pass they are not dropped, but set to zero
        """

        def body(model: nn.Module, backend: Backend) -> list[Any]:
            wrapped = self(model, backend, ddp=ddp, fsdp=fsdp)
            found = []
            for number, one in enumerate(passes):
                wrapped.zero_grad(set_to_none=not alternate or number % 2 == 0)
                one(wrapped, backend.rank)
                found.append(gradient_pieces(wrapped))
            return found

        per_rank = self.on_ranks(ranks, build, body)
        return [joined(pieces) for pieces in zip(*per_rank, strict=True)]


FULL_SHARD_BY_MESSAGES = Wrapping(FSDP, {"strategy": FULL_SHARD}, MESSAGES)
WRAPPINGS = [
    Wrapping(DDP, {}, COOPERATIVE),
    Wrapping(DDP, {"bucket_size": 1}, COOPERATIVE),
    Wrapping(DDP, {"bucket_size": 200}, MESSAGES),
    Wrapping(FSDP, {"strategy": FULL_SHARD}, COMMON),
    FULL_SHARD_BY_MESSAGES,
    Wrapping(FSDP, {"strategy": SHARD_GRAD_OP}, MESSAGES),
    Wrapping(FSDP, {"strategy": NO_SHARD}, COMMON),
    Wrapping(FSDP, {"strategy": ShardingStrategy.hybrid(1)}, COMMON),
]
DDPS = [wrap for wrap in WRAPPINGS if wrap.kind is DDP]
FSDPS = [wrap for wrap in WRAPPINGS if wrap.kind is FSDP]
UNUSED = {"find_unused_parameters": True}  # an option of DDP's


def every_wrapping(test: Any = None, *, among: Sequence[Wrapping] = WRAPPINGS) -> Any:
    """A test that takes `wrap` is run with each of these."""
    mark = pytest.mark.parametrize("wrap", among, ids=str)
    return mark if test is None else mark(test)


every_ddp = every_wrapping(among=DDPS)
every_fsdp = every_wrapping(among=FSDPS)


def assert_gradients(found: Gradients, ranks: int, build: Build, one: Pass, **tolerance: Any):
    """They are those of a naive DDP after the same pass."""
    assert_close(found, naive_gradients(build, ranks, one), **tolerance)


def keeping(model: Any) -> AbstractContextManager[Any]:
    """`no_sync` of a wrapper; a naive DDP only averages when it is asked to."""
    return model.no_sync() if isinstance(model, (DDP, FSDP)) else nullcontext()


def average_kept(model: Any) -> None:
    """`sync_gradients` of a wrapper."""
    if isinstance(model, (DDP, FSDP)):
        model.sync_gradients()

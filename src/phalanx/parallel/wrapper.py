"""A module around another one, which passes for it: the same names, the same state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.errors import MisuseError
from phalanx.parallel.slices import Slice


class Wrapper(nn.Module):
    """Holds `module`; names of parameters and buffers, and the state, are the plain module's.

    backend    the ranks that have the model together
    averages   whether it gives parameters their gradients, which only one may do
    """

    backend: Backend
    averages: ClassVar[bool] = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the plain module; every rank has to load the same."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain module's, under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain module's, under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def slices(self) -> dict[str, Slice]:
        """For each parameter, by its name in the plain module, what this rank's one holds of it.

        Here all of it, in its own shape. A wrapper that splits parameters says which elements this
        rank's `Parameter` of that name has, which is then of one dimension, and may be empty.
        """
        return {name: Slice.whole(tuple(p.shape)) for name, p in self.named_parameters()}

    def writing(self) -> AbstractContextManager[None]:
        """Around writes in place to this rank's parameters, by all ranks: before, wait for whoever
        reads them; after, let the others have them. Here nothing has to be done.
        """
        return nullcontext()


def check_only_one(wrapper: Wrapper, rank: int) -> None:
    """Raise `MisuseError` if a wrapper of another kind inside this one averages gradients, too."""
    kind = type(wrapper)
    for name, inner in wrapper.module.named_modules():
        if isinstance(inner, Wrapper) and inner.averages and type(inner) is not kind:
            raise MisuseError(
                f"rank {rank}: {kind.__name__}: {name or 'the module'} is a "
                f"{type(inner).__name__} already: use only one of them. FSDP averages between "
                "shards and replicas by itself, see ShardingStrategy.hybrid and NO_SHARD",
                rank=rank,
                op=kind.__name__,
            )


def _add_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Let a module that holds a wrapper load the plain names that it saved."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)

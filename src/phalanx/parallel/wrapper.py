"""A module around another one, which passes for it: the same names, the same state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn

from phalanx.aggregation.saved import is_own_key, needed, without_own
from phalanx.backends.base import Backend
from phalanx.errors import MisuseError
from phalanx.parallel.slices import Slice


class Wrapper(nn.Module):
    """Holds `module`; names of parameters and buffers, and the state, are the plain module's.

    backend    the ranks that have the model together
    averages   whether it gives parameters their gradients. Raises `MisuseError` if a wrapper of
               another kind inside it does, too
    """

    averages: ClassVar[bool] = False

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__()
        if self.averages:
            _check_only_one(module, type(self), backend.rank)
        self.module = module
        self.backend = backend
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's, and `own_state`, if there is any."""
        return self._with_own(self.module.state_dict(*args, **kwargs), args, kwargs)

    def _with_own(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        state.update({prefix + key: value for key, value in self.own_state().items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the plain module; every rank has to load the same. `own_state` goes to its rank."""
        plain, own = without_own(state_dict)
        result = self.module.load_state_dict(plain, *args, **kwargs)
        self.load_own_state(own)
        return result

    def own_state(self) -> dict[str, Tensor]:
        """What this rank alone holds, besides parameters: by keys that say whose it is, so that
        those of all ranks can be joined. Here nothing.
        """
        return {}

    def own_keys(self, keys: Iterable[str]) -> list[str]:
        """Which of such keys, of all ranks that there were, `load_own_state` needs on this one."""
        return needed(keys, self.backend)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from such states of all ranks that there were. Here nothing is done with them."""

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


def _check_only_one(module: nn.Module, kind: type[Wrapper], rank: int) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, Wrapper) and inner.averages and type(inner) is not kind:
            raise MisuseError(
                f"rank {rank}: {kind.__name__}: {name or 'the module'} is a "
                f"{type(inner).__name__} already: use only one of them. FSDP averages between "
                "shards and replicas by itself, see ShardingStrategy.hybrid and NO_SHARD",
                rank=rank,
                op=kind.__name__,
            )


def _add_prefix(wrapper: Wrapper, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Let a module that holds a wrapper load what it saved: plain names, and `own_state`."""
    own = {}
    for key in [key for key in state if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if is_own_key(name):
            own[name] = state.pop(key)
        else:
            state[f"{prefix}module.{name}"] = state.pop(key)
    wrapper.load_own_state(own)

"""A module in shards: which part of what this rank has, and full values in and out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from phalanx.errors import MisuseError, SizeMismatchError
from phalanx.fsdp.build import Built
from phalanx.fsdp.flat_param import Flat
from phalanx.parallel.compressor_state import (
    UNSHARDED,
    GradientSharding,
    load_own,
    needed,
    own_state,
    without_own,
)
from phalanx.parallel.optimizer_hooks import release
from phalanx.parallel.wrapper import Slice, Wrapper


class Sharded(Wrapper):
    """What can be said and done about the parameters of a module that was cut."""

    def _take(self, built: Built) -> None:
        """From now on the module is cut."""
        self._ranks, self._units, self._flats = built.ranks, built.units, built.flats
        self._writing, self._conductor, self._sites = built.writing, built.conductor, built.sites
        self._compression, self._detach = built.compression, built.hooks
        self._summoned = self._unwrapped = False

    def slices(self) -> dict[str, Slice]:
        """For each parameter, by name, what part of it this rank's `Parameter` holds."""
        return {
            name: Slice(shape, *flat.layout.part(number, flat.place))
            for flat in self._flats
            for number, (name, shape) in enumerate(zip(flat.names, flat.layout.shapes, strict=True))
        }

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Parameters are written in here, in place: `with fsdp.writing(): p.mul_(0.5)`.

        Every rank enters it, and waits until none reads parameters that it shares with others. An
        optimizer's step and the methods of this class do so by themselves.
        """
        with self._writing.phase("writing()"):
            yield

    @torch.no_grad()
    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's shards, in the order of `parameters()`, from one flat tensor.

        Every rank calls it. `SizeMismatchError` if its length is not that of all of them together;
        nothing is changed then.
        """
        parameters = list(self.parameters())
        wanted = sum(p.numel() for p in parameters)
        if flat.dim() != 1 or flat.numel() != wanted:
            error = SizeMismatchError(
                f"rank {self.backend.rank}: FSDP: update_shards() takes a flat tensor of {wanted} "
                f"elements, all shards of this rank, and was given {flat.numel()} "
                f"({list(flat.shape)}); nothing was changed",
                rank=self.backend.rank,
                op="FSDP",
            )
            raise error
        with self._writing.phase("update_shards()"):
            pieces = torch.split(flat.detach(), [p.numel() for p in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))

    # State ----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's names, and copies of this rank's shards; no communication. And
        `own_state`, if there is any.

        Copies, since shards are parts of larger memory, all of which `torch.save` would write.
        """
        state = self.module.state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                state[name] = value.clone()
        return self._with_own(state, args, kwargs)

    def own_state(self) -> dict[str, Tensor]:
        """What the compressor remembers on this rank: `compression@<rank>/<ranks>.<key>`; of
        `<replicas>x<shards>` ranks with a hybrid strategy.
        """
        compression = self._compression
        if compression is None:
            return {}
        return own_state(compression.compressor, self.backend, self._cut)

    def needs(self, keys: Iterable[str]) -> list[str]:
        """Which of such keys, of all ranks that there were, `load_own_state` needs on this one."""
        return needed(keys, self.backend, self._cut)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from such states, of any number of ranks and any strategy, or of a DDP, joined into
        one dict.

        For as many ranks as before with a strategy like that one, each needs its own only; else all
        are needed, and what averages lack stays the same, to a rounding. A warning in the log says
        what is missing. Nothing is sent. `SizeMismatchError` if it is of another model.
        """
        sizes = {name: prod(slice_.shape) for name, slice_ in self.slices().items()}
        compressor = self._compression.compressor if self._compression is not None else None
        load_own(compressor, state, self.backend, sizes_of=sizes, sharding=self._cut)

    @property
    def _cut(self) -> GradientSharding:
        return self._compression.cut(self._flats) if self._compression is not None else UNSHARDED

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The plain module's state, whole, on every rank; with `rank0_only` empty on the others.

        Copies. Blocks; every rank calls it. Moves (p-1)/p of the parameters' bytes to each rank.
        """
        self._writing.settle()
        wanted = not rank0_only or self.backend.rank == 0
        return full_state(self.module, self._flats, wanted=wanted)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full tensors, as of a plain module, or this rank's shards, as of `state_dict()`.

        Values are copied into the shards. Every rank calls it. `SizeMismatchError` names a tensor
        that is neither, and nothing is changed. `own_state` goes to its rank.
        """
        state_dict, own = without_own(state_dict)
        if assign:
            self._refuse("load_state_dict(assign=True) would put other tensors in place of shards")
        local = shards_of(state_dict, self.module, self._flats, self.backend.rank)
        with self._writing.phase("load_state_dict()"):
            result = self.module.load_state_dict(local, strict=strict)
        self.load_own_state(own)
        return result

    @contextmanager
    def summon_full_params(self, *, writeback: bool = True) -> Iterator[None]:
        """In here modules have full parameters: `fsdp.module.head.weight` has its own shape.

        They are copies, this rank's own. With `writeback`, each rank's part of what it has in the
        end is its shard afterwards; so every rank makes the same changes. `parameters()` are the
        shards all the time. Every rank enters and leaves it. Takes memory for the whole model.
        """
        if self._summoned:
            self._refuse("summon_full_params() inside itself")
        self._writing.settle()
        self._conductor.free()
        copies = [flat.all_shards().clone() for flat in self._flats]
        self._summoned = True
        try:
            with self._sites.shown(self._units):
                for flat, copy in zip(self._flats, copies, strict=True):
                    flat.lend(copy)
                yield
        finally:
            self._summoned = False
            for flat in self._flats:
                flat.take_back()
        if writeback:
            with self._writing.phase("summon_full_params()"), torch.no_grad():
                for flat, copy in zip(self._flats, copies, strict=True):
                    flat.take(copy)

    @torch.no_grad()
    def unwrap(self) -> nn.Module:
        """The plain module, with full parameters: the same `Parameter` objects, without gradients.

        Every rank calls it; this FSDP is of no use afterwards.
        """
        self._writing.settle()
        values = {p: value.clone() for p, value in full_values(self._flats)}
        if self._ranks.shards is not None:
            self._ranks.shards.barrier(label="FSDP: unwrap()")  # nobody reads the memory any more
        self._detach()
        self._unwrapped = True
        for parameter, value in values.items():
            parameter.grad = None
            parameter.data = value
            release(parameter)
        return self.module

    def _refuse(self, problem: str) -> NoReturn:
        rank = self.backend.rank
        raise MisuseError(f"rank {rank}: FSDP: {problem}", rank=rank, op="FSDP")


# ------------------------------------------------------------------------------
# Full values of all parameters, and shards out of full values.


def full_values(flats: Sequence[Flat]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter's full value, in the dtype of the shards, one flat after the other.

    Memory that may be the model's own: it is not to be written, and to be copied to be kept. Every
    rank of the group takes all of them.
    """
    for flat in flats:
        yield from zip(flat.parameters, flat.views(flat.all_shards()), strict=True)


def full_state(module: nn.Module, flats: Sequence[Flat], *, wanted: bool) -> dict[str, Any]:
    """The state of the plain module; empty, if it is not wanted here. A collective of the group."""
    values = {}
    for parameter, value in full_values(flats):
        if wanted:
            values[parameter] = value.clone()
    if not wanted:
        return {}
    local = module.state_dict(keep_vars=True)
    return {
        name: values[value]
        if isinstance(value, nn.Parameter) and value in values
        else value.detach().clone()
        if isinstance(value, Tensor)
        else value
        for name, value in local.items()
    }


def shards_of(
    state: Mapping[str, Any], module: nn.Module, flats: Sequence[Flat], rank: int
) -> dict[str, Any]:
    """A state whose tensors are full or shards already, as a state of shards.

    Raises `SizeMismatchError`, which names the first tensor that is neither; nothing is changed.
    """
    where = {
        parameter: (flat, number)
        for flat in flats
        for number, parameter in enumerate(flat.parameters)
    }
    own = module.state_dict(keep_vars=True)
    result = dict(state)
    for name, value in state.items():
        mine = own.get(name)
        if not isinstance(mine, nn.Parameter) or mine not in where or not isinstance(value, Tensor):
            continue
        flat, number = where[mine]
        shape = flat.layout.shapes[number]
        if tuple(value.shape) == shape:
            start, stop = flat.layout.part(number, flat.place)
            result[name] = value.detach().reshape(-1)[start:stop].view(mine.shape)
        elif value.shape != mine.shape:
            raise SizeMismatchError(
                f"rank {rank}: FSDP: {name} is to be loaded from a tensor of shape "
                f"{list(value.shape)}; it takes the full one, {list(shape)}, or this rank's shard "
                f"of it, {list(mine.shape)}",
                rank=rank,
                op="FSDP",
            )
    return result

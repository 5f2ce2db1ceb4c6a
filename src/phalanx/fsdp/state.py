"""A sharded module: which part of it this rank has, and full values in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from phalanx.errors import DistributedError, MisuseError, SizeMismatchError
from phalanx.fsdp.runtime import FsdpRuntime
from phalanx.fsdp.unsharded import refuse
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


class ShardedModule(Wrapper):
    """What can be said and done about the parameters of a module that was cut."""

    _runtime: FsdpRuntime
    _remove_hooks: Callable[[], None]
    _unwrapped = False

    def slices(self) -> dict[str, Slice]:
        """For each parameter, by name, what part of it this rank's `Parameter` holds."""
        return {
            name: Slice(shape, *flat.layout.part(number, flat.shard_index))
            for flat in self._runtime.flats
            for number, (name, shape) in enumerate(zip(flat.names, flat.layout.shapes, strict=True))
        }

    # Writing parameters ---------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Parameters are written in here, in place: `with fsdp.writing(): p.mul_(0.5)`.

        Every rank enters it, and waits until none reads parameters that it shares with others. An
        optimizer's step and the methods of this class do so by themselves.
        """
        with self._runtime.write_epoch.writing("writing()"):
            yield

    @torch.no_grad()
    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's shards, in the order of `parameters()`, from one flat tensor.

        Every rank calls it. `SizeMismatchError` if its length is not that of all of them together;
        nothing is changed then.
        """
        parameters = list(self.parameters())
        sizes = [p.numel() for p in parameters]
        if flat.dim() != 1 or flat.numel() != sum(sizes):
            self._refuse(
                f"update_shards() takes a flat tensor of {sum(sizes)} elements, all shards of "
                f"this rank, and was given {flat.numel()} ({list(flat.shape)}); nothing was "
                "changed",
                SizeMismatchError,
            )
        with self._runtime.write_epoch.writing("update_shards()"):
            for parameter, values in zip(
                parameters, torch.split(flat.detach(), sizes), strict=True
            ):
                parameter.copy_(values.view(parameter.shape))

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
        compression = self._runtime.reduction.compression
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
        compression = self._runtime.reduction.compression
        compressor = compression.compressor if compression is not None else None
        load_own(compressor, state, self.backend, sizes_of=sizes, sharding=self._cut)

    @property
    def _cut(self) -> GradientSharding:
        compression = self._runtime.reduction.compression
        return compression.cut(self._runtime.flats) if compression is not None else UNSHARDED

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The plain module's state, whole, on every rank; with `rank0_only` empty on the others.

        Copies. Blocks; every rank calls it. Moves (p-1)/p of the parameters' bytes to each rank.
        """
        self._runtime.write_epoch.settle()
        wanted = not rank0_only or self.backend.rank == 0
        full = {p: value.clone() for p, value in self._full_values() if wanted}
        local = self.module.state_dict(keep_vars=True) if wanted else {}
        for name, value in local.items():
            if isinstance(value, nn.Parameter) and value in full:
                local[name] = full[value]
            elif isinstance(value, Tensor):
                local[name] = value.detach().clone()
        return dict(local)

    def _full_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter's full value, in the dtype of the shards, one flat parameter at a time.

        Memory that may be the model's own: it is not to be written, and to be copied to be kept.
        Every rank of the shard group takes all of them.
        """
        for flat in self._runtime.flats:
            yield from zip(flat.parameters, flat.split(flat.all_shards()), strict=True)

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
        local = self._only_shards(state_dict)
        with self._runtime.write_epoch.writing("load_state_dict()"):
            result = self.module.load_state_dict(local, strict=strict)
        self.load_own_state(own)
        return result

    def _only_shards(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state whose tensors are full or shards already, as a state of shards."""
        pieces = self.slices()
        held = {parameter: pieces.get(name) for name, parameter in self.named_parameters()}
        own = self.module.state_dict(keep_vars=True)
        result = dict(state)
        for name, value in state.items():
            mine = own.get(name)
            if not isinstance(mine, nn.Parameter) or not isinstance(value, Tensor):
                continue
            piece = held.get(mine)
            if piece is None:
                continue
            if tuple(value.shape) == piece.shape:
                result[name] = value.detach().reshape(-1)[piece.start : piece.stop].view(mine.shape)
            elif value.shape != mine.shape:
                self._refuse(
                    f"{name} is to be loaded from a tensor of shape {list(value.shape)}; it takes "
                    f"the full one, {list(piece.shape)}, or this rank's shard of it, "
                    f"{list(mine.shape)}",
                    SizeMismatchError,
                )
        return result

    # Full parameters ------------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, *, writeback: bool = True) -> Iterator[None]:
        """In here modules have full parameters: `fsdp.module.head.weight` has its own shape.

        They are copies, this rank's own. With `writeback`, each rank's part of what it has in the
        end is its shard afterwards; so every rank makes the same changes. `parameters()` are the
        shards all the time. Every rank enters and leaves it. Takes memory for the whole model.
        """
        if self._summoned:
            self._refuse("summon_full_params() inside itself")
        runtime = self._runtime
        runtime.write_epoch.settle()
        runtime.reshard_all()
        copies = [flat.all_shards().clone() for flat in runtime.flats]
        runtime.swap.swap_in()
        for group in runtime.groups:
            group.state.after("summon")
        try:
            for flat, copy in zip(runtime.flats, copies, strict=True):
                flat.show(copy)
            yield
        finally:
            for group in runtime.groups:
                group.state.after("restore")
            runtime.swap.swap_out()
            for flat in runtime.flats:
                flat.show_own()
        if writeback:
            with runtime.write_epoch.writing("summon_full_params()"), torch.no_grad():
                for flat, copy in zip(runtime.flats, copies, strict=True):
                    flat.write(copy)

    @property
    def _summoned(self) -> bool:
        return self._runtime.groups[0].state.now == "SUMMONED"

    @torch.no_grad()
    def unwrap(self) -> nn.Module:
        """The plain module, with full parameters: the same `Parameter` objects, without gradients.

        Every rank calls it; this FSDP is of no use afterwards.
        """
        self._runtime.write_epoch.settle()
        values = {p: value.clone() for p, value in self._full_values()}
        shards = self._runtime.shard_groups.shards
        if shards is not None:
            shards.barrier(label="FSDP: unwrap()")  # nobody reads the memory any more
        self._remove_hooks()
        self._unwrapped = True
        for parameter, value in values.items():
            parameter.grad = None
            parameter.data = value
            release(parameter)
        return self.module

    def _refuse(self, problem: str, kind: type[DistributedError] = MisuseError) -> NoReturn:
        refuse(self.backend.rank, problem, kind)

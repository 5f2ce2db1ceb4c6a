"""How ranks that have taken steps of their own come to the same parameters: by their mean.

begin   parameters are alike, and not by a meeting: they have been made or loaded
meet    a period is over
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather
from phalanx.collectives.request import memory_for
from phalanx.compression import Compressor, ErrorFeedback
from phalanx.compression.compressor import GradientBucket, Member, ResidualStore, is_finite, wide
from phalanx.core.backend import Backend
from phalanx.parallel.averaging import AllReduced, Averaging
from phalanx.parallel.buckets import MESSAGE, batches, broadcast_all_

log = logging.getLogger("phalanx")


class Meeting(Protocol):
    """Brings the ranks' parameters together.

    alike   whether they are the same on all ranks since the last one
    """

    alike: bool

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""

    def begin(self) -> None:
        """The ranks have the same parameters, from which the next period begins."""

    def meet(self, label: str, *, whole: bool) -> None:
        """Overwrite this rank's parameters; blocks until all ranks have come.

        whole   leave nothing out, so that parameters are the same on all ranks
        """

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """What goes on from here needs; by keys that say whose it is (saved.py).

        apart   whether a period is under way
        """

    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Go on from there. Returns the parameters that the ranks had when the period began, by
        name, if it was under way and it knows them.
        """


class MeanOfParameters:
    """Everybody takes the mean of all (Stich 2019)."""

    def __init__(self, trained: Mapping[str, nn.Parameter], backend: Backend) -> None:
        self._trained = trained
        self._backend = backend
        self._averaging = AllReduced(backend)
        self.alike = True

    @property
    def bytes_sent(self) -> int:
        """2(p-1)/p of the parameters' bytes for each mean."""
        return self._averaging.bytes_sent

    def begin(self) -> None:
        """Nothing is kept of it."""

    @torch.no_grad()
    def meet(self, label: str, *, whole: bool = True) -> None:
        """One all-reduce."""
        if self._backend.world_size == 1:
            return
        trained = self._trained.values()
        flats = averaged(trained, self._averaging, self._backend, label=label)
        if not all_finite(flats):
            log.warning(
                "rank %d: LocalSGD: parameters are not finite, and by their mean on no rank any "
                "more: %s. Go back to a checkpoint",
                self._backend.rank,
                in_words(not_finite_on(self._trained, self._backend)),
            )
        for flat in flats:
            for parameter, mean in flat.views():
                parameter.copy_(mean)

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """None."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """None."""
        return {}


def in_words(found: Mapping[int, str]) -> str:
    """For each rank the first parameter that is not finite, for a message."""
    if not found:
        return "on each rank all are, but not their mean"
    return ", ".join(f"{name} on rank {rank}" for rank, name in found.items())


# ------------------------------------------------------------------------------
# What messages leave out stays in the parameters of the rank that would have sent it.
#
#     d  =  t - t_i             how far this rank's parameters are from the copy t that all have
#     q  =  its message         what the others hear of d
#     t_i  <-  t' - (d - q)     beside the new copy t' by what they have not heard
#
# So parameters are the memory of error feedback: nothing is lost, no state is added, and a rank
# goes on from all that it has learnt itself (Xie et al. 2020, "CSER: Communication-efficient SGD
# with Error Reset").


class Unsent(ResidualStore):
    """Keeps what is left out of one average until parameters are written."""

    def __init__(self) -> None:
        self._rests: dict[str, Tensor] = {}
        self._parts = 1

    def take(self, name: str) -> Tensor:
        """What has been left out of that parameter; it is forgotten."""
        return self._rests.pop(name)

    def add_residual(self, bucket: GradientBucket, member: Member) -> Tensor:
        """All of the bucket."""
        self._parts = member.parts
        return bucket.flat.to(wide(bucket.flat.dtype), copy=True)

    def store_residual(self, bucket: GradientBucket, rest: Callable[[], Tensor]) -> None:
        """This rank's to hold."""
        for piece, values in bucket.cut(rest()):
            self._rests[piece.name] = values

    def add_owned_residual(self, bucket: GradientBucket, start: int, mean: Tensor) -> Tensor:
        """The mean."""
        return mean.clone()

    def store_owned_residual(
        self, bucket: GradientBucket, start: int, rest: Callable[[], Tensor]
    ) -> None:
        """Of a mean of p ranks p times as much is this rank's to hold."""
        left = rest()
        for piece in bucket.pieces:
            low, high = max(piece.start, start), min(piece.stop, start + len(left))
            if low < high:
                held = self._rests[piece.name].view(-1)[low - piece.start : high - piece.start]
                held.add_(left[low - start : high - start], alpha=self._parts)


def without_memory(compressor: Compressor) -> Compressor:
    """The compressor that error feedback would use, without the feedback."""
    if isinstance(compressor, ErrorFeedback):
        return compressor.inner
    return compressor.contraction()


# ------------------------------------------------------------------------------
# Tensors that are averaged together: flat copies of them, one dtype and bounded in size.


class Flat:
    """What goes into one message.

    parameters  the tensors that it is about
    flat        1-D memory, one dtype
    """

    def __init__(self, tensors: Sequence[Tensor], backend: Backend) -> None:
        self.parameters: list[Any] = list(tensors)
        count, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.flat = memory_for(backend, (count,), first.dtype, first.device)

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, and its place in here, in its shape."""
        pieces = torch.split(self.flat, [tensor.numel() for tensor in self.parameters])
        return [
            (tensor, piece.view(tensor.shape))
            for tensor, piece in zip(self.parameters, pieces, strict=True)
        ]


Put = Callable[[Tensor, Tensor], object]


def copy_into(place: Tensor, tensor: Tensor) -> None:
    """Of a tensor its values are averaged."""
    place.copy_(tensor)


@torch.no_grad()
def averaged(
    tensors: Iterable[Tensor],
    averaging: Averaging,
    backend: Backend,
    *,
    label: str,
    put: Put = copy_into,
) -> list[Flat]:
    """The means of tensors over the ranks, in new memory; blocks until they are there.

    put    `put(place, tensor)` writes what is to be averaged of a tensor into its place
    label  says in errors what this is; ranks whose labels differ do not mean the same

    All messages are under way together, and of the same bits on every rank when they are in.
    """
    flats, begun = [], []
    for number, batch in enumerate(batches(tensors, MESSAGE)):
        flat = Flat(batch, backend)
        for tensor, place in flat.views():
            put(place, tensor)
        flats.append(flat)
        begun.append(averaging.begin(flat, f"{label}, part {number}"))
    averaging.finish(begun)
    averaging.settle(flats, skipped=False)
    return flats


def all_finite(flats: Iterable[Flat]) -> bool:
    """Whether all values are: the same answer on every rank, of averages."""
    return all(is_finite(flat.flat) for flat in flats)


def not_finite_on(values: Mapping[str, Tensor], backend: Backend) -> dict[int, str]:
    """For each rank that has a value that is infinite or NaN, the first name that has one.

    Blocks for one message of 8 bytes.
    """
    names = list(values)
    mine = next((at for at, name in enumerate(names) if not is_finite(values[name])), len(names))
    found = all_gather(torch.tensor([mine], dtype=torch.int64), backend).tolist()
    return {rank: names[at] for rank, at in enumerate(found) if at < len(names)}


# ------------------------------------------------------------------------------
# Buffers at a meeting: those that a state dict has.
#
# floating   the mean, as of parameters: statistics of batch norm
# others     rank 0's: counters, masks
#
# What a state dict leaves out is made anew from something else, and stays each rank's.


def kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of the state dict, by their first name."""
    found: dict[str, Tensor] = {}
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def floating(module: nn.Module) -> dict[str, Tensor]:
    """Those of which there is a mean."""
    return {name: b for name, b in kept_buffers(module).items() if b.is_floating_point()}


class Buffers:
    """Of a module, made alike over the ranks of a backend."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self._module = module
        self._backend = backend
        self._averaging = AllReduced(backend)

    @property
    def bytes_sent(self) -> int:
        """For means."""
        return self._averaging.bytes_sent

    @torch.no_grad()
    def meet(self, label: str) -> None:
        """Make them alike, in place; one all-reduce and one broadcast, of what there is."""
        if self._backend.world_size == 1:
            return
        means, others = floating(self._module), kept_buffers(self._module)
        for flat in averaged(
            means.values(), self._averaging, self._backend, label=f"{label}, buffers"
        ):
            for buffer, mean in flat.views():
                buffer.copy_(mean)
        rest = [buffer for name, buffer in others.items() if name not in means]
        broadcast_all_(rest, self._backend, 0, label=f"{label}, buffers of rank 0")

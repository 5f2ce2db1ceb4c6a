"""How ranks that have taken steps of their own come to the same parameters: by means over ranks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather
from phalanx.compression.compressor import GradientBucket, Member, ResidualStore, is_finite, wide
from phalanx.core.backend import Backend
from phalanx.parallel.averaging import AllReduceAveraging, GradientAveraging
from phalanx.parallel.buckets import MESSAGE, batches, broadcast_all_

log = logging.getLogger("phalanx")


class ParameterSync(ABC):
    """Brings the ranks' parameters together.

    trained   the parameters, by name
    alike     whether they are the same on all ranks since the last sync
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], backend: Backend) -> None:
        self.alike = True
        self._trained = trained
        self._backend = backend
        self._all_reduce = AllReduceAveraging(backend)

    @property
    def bytes_sent(self) -> int:
        """By this rank so far, as rings and direct messages send them."""
        return self._all_reduce.bytes_sent

    @abstractmethod
    def begin(self) -> None:
        """The ranks have the same parameters, without a sync: the next period begins from them."""

    @abstractmethod
    def sync(self, label: str, *, whole: bool) -> None:
        """Overwrite this rank's parameters; blocks until all ranks have called it.

        whole   leave nothing out, so that parameters are the same on all ranks
        """

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """What is needed to continue from here, by keys that say whose it is.

        apart   whether ranks have different parameters
        """
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Continue from there. Returns the parameters that the ranks had when the period began, by
        name, if the state has them.
        """
        return {}

    def _not_finite(self) -> str:
        """The first parameter that is infinite or NaN, of each rank that has one, for a message.

        Blocks for one message of 8 bytes.
        """
        names, tensors = list(self._trained), self._trained.values()
        mine = next((at for at, tensor in enumerate(tensors) if not is_finite(tensor)), len(names))
        found = all_gather(torch.tensor([mine], dtype=torch.int64), self._backend).tolist()
        bad = [f"{names[at]} on rank {rank}" for rank, at in enumerate(found) if at < len(names)]
        return ", ".join(bad) or "on each rank all are, but not their mean"


class MeanOfParameters(ParameterSync):
    """Every rank takes the mean of all (Stich 2019): one all-reduce."""

    def begin(self) -> None:
        """Nothing is kept of them."""

    @torch.no_grad()
    def sync(self, label: str, *, whole: bool) -> None:
        """Take the mean."""
        if self._backend.world_size == 1:
            return
        flats = averaged(self._trained.values(), self._all_reduce, self._backend, label=label)
        if not all(is_finite(flat.flat) for flat in flats):
            log.warning(
                "rank %d: LocalSGD: parameters are not finite, and by their mean on no rank any "
                "more: %s. Go back to a checkpoint",
                self._backend.rank,
                self._not_finite(),
            )
        for flat in flats:
            for parameter, mean in flat.views():
                parameter.copy_(mean)


# ------------------------------------------------------------------------------
# What messages leave out stays in the parameters of the rank that would have sent it.
#
#     d  =  t - t_i             how far this rank's parameters are from the copy t that all have
#     q  =  its message         what is sent of d
#     t_i  <-  t' - (d - q)     the new copy t', and the residual d - q
#
# So parameters are the memory of error feedback: nothing is lost, no state is added, and a rank
# continues from all that it has learnt itself (Xie et al. 2020, "CSER: Communication-efficient SGD
# with Error Reset").


class ParameterResidual(ResidualStore):
    """Keeps what is left out of one average until parameters are written."""

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}
        self._parts = 1

    def take(self, name: str) -> Tensor:
        """The residual of that parameter; it is forgotten."""
        return self._residuals.pop(name)

    def add_residual(self, bucket: GradientBucket, member: Member) -> Tensor:
        """All of the bucket: former residuals are in its values already."""
        self._parts = member.parts
        return bucket.flat.to(wide(bucket.flat.dtype), copy=True)

    def store_residual(self, bucket: GradientBucket, residual: Callable[[], Tensor]) -> None:
        """Keep it for `take`."""
        for place, values in bucket.cut(residual()):
            self._residuals[place.name] = values

    def add_owned_residual(self, bucket: GradientBucket, start: int, mean: Tensor) -> Tensor:
        """The mean."""
        return mean.clone()

    def store_owned_residual(
        self, bucket: GradientBucket, start: int, residual: Callable[[], Tensor]
    ) -> None:
        """Add to this rank's own p times what is left out of a mean of p ranks."""
        left = residual()
        for place, low, high in bucket.overlaps(start, start + len(left)):
            own = self._residuals[place.name].view(-1)[low - place.start : high - place.start]
            own.add_(left[low - start : high - start], alpha=self._parts)


# ------------------------------------------------------------------------------
# Tensors that are averaged together: flat copies of them, one dtype and bounded in size.


class FlatTensors:
    """What is averaged in one message.

    parameters  the tensors
    flat        1-D memory, one dtype, in which each has its place
    """

    def __init__(self, tensors: Sequence[Tensor], backend: Backend) -> None:
        self.parameters: list[Any] = list(tensors)
        count, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.flat = backend.empty(count, dtype=first.dtype, device=first.device)

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, and its place in here, in its shape."""
        pieces = torch.split(self.flat, [tensor.numel() for tensor in self.parameters])
        return [
            (tensor, piece.view(tensor.shape))
            for tensor, piece in zip(self.parameters, pieces, strict=True)
        ]


@torch.no_grad()
def averaged(
    tensors: Iterable[Tensor],
    averaging: GradientAveraging,
    backend: Backend,
    *,
    label: str,
    put: Callable[[Tensor, Tensor], object] = torch.Tensor.copy_,
) -> list[FlatTensors]:
    """The means of tensors over the ranks, in new memory; blocks until they are there.

    put    `put(place, tensor)` writes what is to be averaged of a tensor into its place
    label  says in errors what this is; ranks whose labels differ do not mean the same

    All messages are under way together. The results are the same bits on every rank.
    """
    flats, begun = [], []
    for number, batch in enumerate(batches(tensors, MESSAGE)):
        flat = FlatTensors(batch, backend)
        for tensor, place in flat.views():
            put(place, tensor)
        flats.append(flat)
        begun.append(averaging.begin(flat, f"{label}, part {number}"))
    averaging.finish(begun)
    averaging.settle(flats, skipped=False)
    return flats


# ------------------------------------------------------------------------------
# Buffers, at a sync: those that a state dict has.
#
# floating   the mean, as of parameters: statistics of batch norm
# others     rank 0's: counters, masks
#
# What a state dict leaves out is made anew from something else, and stays each rank's.


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of the state dict, by their first name."""
    found: dict[str, Tensor] = {}
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


@torch.no_grad()
def sync_buffers_(
    module: nn.Module, averaging: GradientAveraging, backend: Backend, label: str
) -> None:
    """Make them alike, in place; one all-reduce and one broadcast, of what there is."""
    if backend.world_size == 1:
        return
    buffers = persistent_buffers(module).values()
    means = [buffer for buffer in buffers if buffer.is_floating_point()]
    others = [buffer for buffer in buffers if not buffer.is_floating_point()]
    for flat in averaged(means, averaging, backend, label=f"{label}, buffers"):
        for buffer, mean in flat.views():
            buffer.copy_(mean)
    broadcast_all_(others, backend, 0, label=f"{label}, buffers of rank 0")

"""DiLoCo's sync: how far all ranks have come, on average, is a gradient.

    inner   a step of each rank's optimizer, every time    t  ->  t_i
    outer   mean of (t - t_i)  ->  the outer optimizer     t  ->  t'      t_i <- t'

(Douillard et al. 2023; without momentum and with rate 1, t' is the mean of t_i.) With a
`ParameterResidual`, t_i becomes t' and what rank i has not sent to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.compression import Compressor
from phalanx.compression.compressor import (
    NO_RESIDUALS,
    GradientBucket,
    Member,
    ResidualStore,
    is_finite,
    wide,
)
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError, UnsupportedObjectError
from phalanx.parallel.averaging import GradientAveraging
from phalanx.parallel.guards import (
    check_agreement,
    describe_with_values,
    first_on_ranks,
    refuse,
)

log = logging.getLogger("phalanx")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def not_finite(trained: Mapping[str, nn.Parameter], backend: Backend) -> str:
    """The first parameter that is infinite or NaN, of each rank that has one, for a message.

    Blocks for one message of 8 bytes.
    """
    values = enumerate(trained.values())
    mine = next((at for at, value in values if not is_finite(value)), len(trained))
    bad = first_on_ranks(mine, list(trained), backend)
    named = ", ".join(f"{name} on rank {rank}" for rank, name in bad.items())
    return named or "on each rank all are, but not their mean"


class OuterStep:
    """A step of an optimizer of its own, on copies of the parameters that all ranks have alike.

    optimizer   the outer one
    skipped     how many steps were not taken, since their gradient was not finite
    compressed  averages by the compressor; None: as `dense` does, by an all-reduce
    who         takes them, in errors
    residual    keeps what messages leave out, if it is to stay in parameters
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        dense: GradientAveraging,
        backend: Backend,
        make: MakeOptimizer,
        compression: Compressor | None,
        *,
        who: str,
        residual: ParameterResidual | None = None,
    ) -> None:
        self.skipped = 0
        self._trained = trained
        self._dense = dense
        self._backend = backend
        self._who = who
        self._residual = residual
        self._copies = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()
        }
        self._copy_of: dict[Tensor, Tensor] = {trained[n]: copy for n, copy in self._copies.items()}
        self.optimizer = make(list(self._copies.values()))
        self._check_optimizer()
        self.compressed: GradientAveraging | None = None
        if compression is not None:
            names: dict[Tensor, str] = {p: name for name, p in trained.items()}
            self.compressed = GradientAveraging(
                backend, compression, names, feedback=residual or NO_RESIDUALS
            )

    def _check_optimizer(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                "DiLoCo(outer=) makes a torch optimizer of a list of parameters, such as "
                f"lambda params: torch.optim.SGD(params, lr=0.7), not {self.optimizer!r}"
            )
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, copy in self._copies.items():
            if id(copy) not in given:
                refuse(
                    self._who,
                    self._backend.rank,
                    f"the outer optimizer leaves out {name}, which would stay as it is: give it "
                    "all parameters that it is called with",
                )

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters. Later only outer steps change the copies: these stay the same on all
        ranks, whatever becomes of a rank's parameters.
        """
        for name, parameter in self._trained.items():
            self._copies[name].copy_(parameter)

    @torch.no_grad()
    def sync(self, label: str, *, whole: bool) -> bool:
        """Average the outer gradients, step, and copy. If these gradients are not finite there is
        no step: all parameters are as they were when the period began.

        whole   leave nothing out, so that parameters are the same on all ranks

        Returns whether they are. Raises `DesyncError` if the copies are not the same on all ranks:
        their hashes are compared, in a message of 8 bytes.
        """
        if self._residual is not None and self._backend.world_size == 1:
            return True

        def put(place: Tensor, parameter: Tensor) -> None:
            torch.sub(self._copy_of[parameter], parameter, out=place)

        residual = None if whole else self._residual
        averaging = self.compressed
        if averaging is None or (whole and self._residual is not None):
            averaging = self._dense
        flats = averaging.means_of(self._trained.values(), label=label, put=put)
        check_agreement(
            [describe_with_values(name, copy) for name, copy in self._copies.items()],
            self._backend,
            op=f"{self._who}, parameters as they were after the last sync",
            remedy="Load the same state on every rank: that of a checkpoint, or one that was taken "
            "right after sync()",
        )
        finite = all(is_finite(flat.flat) for flat in flats)
        if finite:
            for flat in flats:
                for parameter, gradient in flat.views.items():
                    self._copy_of[parameter].grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.skipped += 1
            log.warning(
                "rank %d: %s: %s is skipped on every rank, and parameters are those of the one "
                "before: they were not finite: %s. That rank's own optimizer may keep what is not "
                "finite: give it a new one",
                self._backend.rank,
                self._who,
                "an outer step" if self._residual is None else "a sync",
                not_finite(self._trained, self._backend),
            )
        for name, parameter in self._trained.items():
            parameter.copy_(self._copies[name])
            if residual is not None:
                left = residual.take(name)
                if finite:
                    parameter.sub_(left)
        return residual is None or not finite

    # State: the outer optimizer's is the same on every rank.
    #
    # outer@all.parameter.<name>          a parameter as it was when the period began
    # outer@all.state.<key>.<name>        what the optimizer keeps for it: a tensor, or a number
    # outer@all.option.<group>.<key>      a number of a parameter group, such as the learning rate

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """The outer optimizer's, and the copies while they are needed.

        Raises `UnsupportedObjectError` if the optimizer keeps something that is no tensor and no
        number.
        """
        state: dict[str, Tensor] = {}
        for name, copy in self._copies.items() if apart else ():
            state[f"{_PREFIX}parameter.{name}"] = copy.detach().clone()
        for name, copy in self._copies.items():
            for key, value in self.optimizer.state.get(copy, {}).items():
                if value is not None:
                    state[f"{_PREFIX}state.{key}.{name}"] = _as_tensor(value, f"{key} of {name}")
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, (bool, int, float, Tensor)):
                    state[f"{_PREFIX}option.{number}.{key}"] = _as_tensor(value, key)
        return state

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Continue from there. Returns the copies, if they are in it. Without any state nothing is
        done. Raises `SizeMismatchError` for that of another model.
        """
        entries = []
        for key, value in state.items():
            if not key.startswith(_PREFIX):
                continue
            kind, _, rest = key[len(_PREFIX) :].partition(".")
            first, name = ("", rest) if kind == "parameter" else rest.split(".", 1)
            entries.append((kind, first, name, value))
            copy = self._copies.get(name)
            fits = copy is not None and (kind != "parameter" or value.shape == copy.shape)
            if kind != "option" and not fits:
                has = f"has shape {list(copy.shape)}" if copy is not None else "is not there"
                rank = self._backend.rank
                raise SizeMismatchError(
                    f"rank {rank}: DiLoCo: the state dict has an outer {name} of shape "
                    f"{list(value.shape)}, and in this model it {has}: it is the state of another "
                    "model",
                    rank=rank,
                )
        if entries:
            self.optimizer.state.clear()
        groups = dict(enumerate(self.optimizer.param_groups))
        for kind, first, name, value in entries:
            if kind == "parameter":
                self._copies[name].copy_(value)
            elif kind == "state":
                self.optimizer.state[self._copies[name]][first] = value.clone()
            elif name in (group := groups.get(int(first), {})):
                if isinstance(group[name], Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value.item()
        return self._copies if any(kind == "parameter" for kind, *_ in entries) else {}


_PREFIX = "outer@all."


def _as_tensor(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, (bool, int, float)):
        raise UnsupportedObjectError(
            f"DiLoCo's outer optimizer keeps {value!r} as {what}: a state dict takes tensors and "
            "numbers only"
        )
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


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
        self._residuals |= {place.name: values for place, values in bucket.cut(residual())}

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

"""DiLoCo's sync, an outer step: the ranks' mean progress is a gradient.

    inner steps   of each rank's optimizer, H times            t  ->  t_i
    outer step    d = mean of all (t - t_j), the outer         t  ->  t'      t_i <- t'
                  gradient; the outer optimizer steps by d

(Douillard et al. 2023; others call d the pseudo-gradient. Without momentum and with rate 1, t' is
the mean of t_j.) With a `ParameterResidual`, t_i becomes t' plus rank i's unsent part.
`OuterStep.sync` is the outer step; `naive_local_sgd.py` has all of it in its shortest form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

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
from phalanx.parallel.averaging import Bucket, GradientAveraging
from phalanx.parallel.guards import (
    check_agreement,
    describe_with_values,
    first_on_ranks,
    refuse,
)

log = logging.getLogger("phalanx")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def not_finite(trained: Mapping[str, nn.Parameter], backend: Backend) -> str:
    """Return, for a message, each rank's first parameter that is infinite or NaN, if any.

    Blocks for one message of 8 bytes.
    """
    values = enumerate(trained.values())
    mine = next((at for at, value in values if not is_finite(value)), len(trained))
    bad = first_on_ranks(mine, list(trained), backend)
    named = ", ".join(f"{name} on rank {rank}" for rank, name in bad.items())
    return named or "on each rank all are, but not their mean"


class OuterStep:
    """A step of an optimizer of its own, on copies of the parameters that all ranks share.

    optimizer   the outer one
    copies      t, by the names of the parameters
    skipped     number of steps that were skipped, since their gradient was not finite
    compressed  averages by the compressor; None: as `dense` does, by an all-reduce
    who         the wrapper's name in errors
    residual    keeps the parts that messages leave out, if they stay in parameters
    began       parameters at the beginning of this period, if they have such parts, which have
                their weights already, and others are to come
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
        self.began: dict[Tensor, Tensor] = {}
        self._trained = trained
        self._dense = dense
        self._backend = backend
        self._who = who
        self._residual = residual
        self.copies = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()
        }
        self._copy_of: dict[Tensor, Tensor] = {trained[n]: copy for n, copy in self.copies.items()}
        self.optimizer = make(list(self.copies.values()))
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
        for name, copy in self.copies.items():
            if id(copy) not in given:
                refuse(
                    self._who,
                    self._backend.rank,
                    f"the outer optimizer leaves out {name}, which would stay as it is: give it "
                    "all parameters that it is called with",
                )

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters. Later only outer steps change the copies, so that these stay the
        same on all ranks while the ranks' parameters differ.
        """
        for name, parameter in self._trained.items():
            self.copies[name].copy_(parameter)

    def regrouped(self) -> None:
        """Step with the ranks that the backend has now; `dense` does so already."""
        self.skipped = 0
        self.began = {}
        if self._residual is not None:
            self._residual.forget()
        if self.compressed is not None:
            self.compressed.regrouped()

    @torch.no_grad()
    def sync(self, label: str, *, whole: bool, share: float) -> bool:
        """Average the outer gradients, step, and copy. If these gradients are not finite, skip the
        step: all parameters are as at the beginning of the period.

        whole   leave nothing out, so that parameters are the same on all ranks
        share   how much this rank's progress counts in the mean

        Returns whether they are. Raises `DesyncError` if the copies are not the same on all ranks.
        """
        if self._residual is not None and self._backend.world_size == 1:
            return True
        d = self._mean_outer_gradients(label, whole=whole, share=share)
        self.began = {}
        self._check_copies()
        if taken := all(is_finite(bucket.flat) for bucket in d):
            for bucket in d:
                for parameter, gradient in bucket.views.items():
                    self._copy_of[parameter].grad = gradient
            self.optimizer.step()  # t -> t'
            self.optimizer.zero_grad()
        else:
            self._skip()
        for name, parameter in self._trained.items():
            parameter.copy_(self.copies[name])  # t_i <- t'
        if self._residual is None or whole:
            return True
        for name, parameter in self._trained.items():
            left = self._residual.take(name)
            if taken:
                parameter.sub_(left)
        return not taken

    def _mean_outer_gradients(self, label: str, *, whole: bool, share: float) -> list[Bucket]:
        """Return the mean over the ranks of t - t_i, in buckets. Blocks."""

        def put(place: Tensor, parameter: Tensor) -> None:
            torch.sub(self._copy_of[parameter], parameter, out=place)

        averaging = self.compressed
        if averaging is None or (whole and self._residual is not None):
            averaging = self._dense
        kept = {p: self._copy_of[p] - began for p, began in self.began.items()}
        tensors = self._trained.values()
        return averaging.means_of(tensors, label=label, put=put, share=share, kept=kept)

    def _check_copies(self) -> None:
        """Compare hashes of the copies over the ranks, in a message of 8 bytes."""
        check_agreement(
            [describe_with_values(name, copy) for name, copy in self.copies.items()],
            self._backend,
            op=f"{self._who}, parameters as they were after the last sync",
            remedy="Load the same state on every rank: that of a checkpoint, or one that was taken "
            "right after sync()",
        )

    def _skip(self) -> None:
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


# ------------------------------------------------------------------------------
# The part that a message leaves out stays in the sender's parameters.
#
#     d  =  t - t_i             how far this rank's parameters are from the copy t that all have
#     q  =  its message         what is sent of d
#     t_i  <-  t' - (d - q)     the new copy t', and the residual d - q
#
# So parameters are the memory of error feedback: nothing is lost, no state is added, and a rank
# continues from all that it has learnt itself (Xie et al. 2020, "CSER: Communication-efficient SGD
# with Error Reset").


class ParameterResidual(ResidualStore):
    """Keeps the part that one average leaves out until parameters are written."""

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}
        self._parts = 1

    def forget(self) -> None:
        """Forget the residuals of an average that has failed."""
        self._residuals.clear()

    def take(self, name: str) -> Tensor:
        """Return the residual of that parameter, and forget it."""
        return self._residuals.pop(name)

    def add_residual(self, bucket: GradientBucket, member: Member) -> Tensor:
        """Return the whole bucket: its values include former residuals."""
        self._parts = member.parts
        return bucket.flat.to(wide(bucket.flat.dtype), copy=True)

    def store_residual(self, bucket: GradientBucket, residual: Callable[[], Tensor]) -> None:
        """Keep the residual for `take`."""
        self._residuals |= {place.name: values for place, values in bucket.cut(residual())}

    def add_owned_residual(self, bucket: GradientBucket, start: int, mean: Tensor) -> Tensor:
        return mean.clone()

    def store_owned_residual(
        self, bucket: GradientBucket, start: int, residual: Callable[[], Tensor]
    ) -> None:
        """Add p times the residual of a mean of p ranks to this rank's own residual."""
        left = residual()
        for place, low, high in bucket.overlaps(start, start + len(left)):
            own = self._residuals[place.name].view(-1)[low - place.start : high - place.start]
            own.add_(left[low - start : high - start], alpha=self._parts)

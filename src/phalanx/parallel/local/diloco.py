"""DiLoCo: each rank trains by itself; an outer optimizer steps along the way they have come.

(Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"; 2025,
"Streaming DiLoCo": outer gradients in 4 bits.)
"""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.optim import Optimizer

from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.compression.compressor import check_compressor, check_floating
from phalanx.parallel.local.outer import MakeOptimizer, OuterStep
from phalanx.parallel.local.periodic import Periodic


class DiLoCo(Periodic):
    """A module of which the ranks of `backend` take an outer step after every H-th step.

        model = DiLoCo(
            model, backend, every=100,
            outer=lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
            compression=ErrorFeedback(Quantized(bits=4)),
        )
        optimizer = torch.optim.AdamW(model.parameters())       # the script goes on unchanged
        ...
        model.sync()                                            # at the end of training

    module       the model; the same on every rank, in structure. Its parameters and buffers are
                 overwritten with rank 0's here, in place, so an optimizer may exist already
    every        optimizer steps between two outer steps; the paper's 500, its rate 0.7 and momentum
                 0.9 are for long runs
    outer        makes the outer optimizer of a list of parameters: any of torch, with the same
                 options on every rank. `.outer_optimizer` is what it has made
    compression  send outer gradients in another form; a copy is made, `.compression`

    An outer gradient is how far a rank has come: parameters when the ranks last met, minus those it
    has now. Its mean over the ranks is the gradient of a step of the outer optimizer, on copies
    that are the same bits on every rank; the module's parameters become those. With
    `SGD(params, lr=1)` that is `LocalSGD`. The step is part of `optimizer.step()` of every H-th
    step, which blocks then, and sends 2(p-1)/p of the parameters' bytes, or what the compressor
    makes of them, and 16 bytes, by which the copies are compared. Copies take the parameters'
    memory once, the outer optimizer what it keeps.

    What `LocalSGD` says of counting, buffers, optimizers, checkpoints and ranks out of step is so
    here, too. `sync()` takes an outer step with what there is. A checkpoint has the copies, the
    outer optimizer's state, and what each rank's compressor has left over; on another number of
    ranks, the mean of how far they have come stays the same.

    An outer gradient that is not finite on one rank makes the mean not finite: then no rank takes
    the step, parameters are those of the last one, the compressor's state stays as it was, and a
    warning in the log names the rank; `skipped_steps` counts.

    Raises `DesyncError`, on every rank, if the ranks' models or options differ, or later their
    copies, naming the first parameter or option that does; `UnsupportedOperationError` if a
    parameter's dtype cannot be compressed; `MisuseError` for a module that is wrapped already, or
    an outer optimizer that leaves out a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        *,
        every: int,
        outer: MakeOptimizer,
        compression: Compressor | None = None,
    ) -> None:
        super().__init__(module, backend, every=every)
        if compression is not None:
            check_compressor(compression, "DiLoCo(compression=)")
            for parameter in self._trained.values():
                check_floating(parameter, compression)
        self.compression = deepcopy(compression)
        self._outer = OuterStep(self._trained, backend, outer, self.compression, who="DiLoCo")
        options = {"outer": _described(self.outer_optimizer), "compression": compression}
        self._begin_with(self._outer, options)

    @property
    def outer_optimizer(self) -> Optimizer:
        """The outer optimizer, for its learning rate; the same on every rank."""
        return self._outer.optimizer

    @property
    def skipped_steps(self) -> int:
        """How many outer steps were not taken, since their gradient was not finite."""
        return self._outer.skipped


def _described(optimizer: Optimizer) -> str:
    """Its name and options."""
    groups = [
        ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"

"""LocalSGD: each rank trains by itself, and parameters are averaged every so many steps.

    t_i  <-  mean of all t_j,  after every H steps                      on every rank i

(Stich 2019, "Local SGD Converges Fast and Communicates Little"; McMahan et al. 2017, "FedAvg".)
"""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.optim import SGD, Optimizer

from phalanx.compression import Compressor, ErrorFeedback
from phalanx.core.backend import Backend
from phalanx.parallel.local_sgd.outer import MakeOptimizer, OuterStep, ParameterResidual
from phalanx.parallel.local_sgd.periodic import PeriodicSync


class LocalSGD(PeriodicSync):
    """A module whose parameters the ranks of `backend` average after every H-th step.

        model = LocalSGD(model, backend, every=8)
        optimizer = torch.optim.AdamW(model.parameters())       # the script goes on unchanged
        ...
        model.sync()                                            # at the end of training

    The average is part of `optimizer.step()`, which blocks then; all other steps send nothing.
    Right after it parameters are the same bits on all ranks; in between each rank has its own:
    `sync()` averages now, `averaged()` only to look.

    module       the model; the same on every rank, in structure. Its parameters and buffers are
                 overwritten with rank 0's here, in place, so an optimizer may exist already
    every        optimizer steps between two averages
    start_after  number of first steps with an average after each, of whole parameters: while
                 they change fast (Lin et al. 2020, "post-local SGD")
    compression  send less in each average: `TopK(0.01)`, `PowerSGD(4)`, ...; a copy is made,
                 `.compression`

    # Notes
    A ring sends 2(p-1)/p of the parameters' bytes from each of p ranks: per step an H-th of what
    DDP sends. With `every=1` and SGD, with momentum too, it is DDP, to rounding.

    Parameters that are trained when the module is wrapped, and floating buffers of the state dict,
    are averaged; other buffers are rank 0's. Optimizers keep their state on each rank (momentum,
    Adam's averages). Gradients are each rank's own: clip them as in one process. A value that is
    not finite on one rank is not finite on any after the average: a warning in the log names the
    rank.

    Every rank takes as many steps, or calls `sync()` when it is through, or trains in `join`: the
    error of a rank that waits for one with fewer says so. Ranks count alike, or, with `step`, by
    the samples or tokens that they have had. If only one rank's gradient scaler skips a step, that
    rank is one behind, and the others wait for it.

    `state_dict` has this rank's parameters, and extra keys while ranks have different ones
    (`own_state`). A checkpoint (`save_checkpoint`) keeps each rank's parameters, and its
    optimizer's state for them: as many ranks go on bit for bit. Another number of ranks, or another
    module, loads the means, and rank 0's optimizer state.

    Raises `DesyncError`, on every rank, if the ranks' models or options differ, naming the first
    parameter or option that does; `MisuseError` for a module that is wrapped already.

    # Compression
    All ranks have an equal copy of the parameters. A rank sends the compressed difference of its
    parameters from the copy, and the mean of messages moves the copy. The part that a message
    leaves out stays in that rank's parameters, ahead of the copy, and so in its next difference:
    that is error feedback with the residual in the parameters, and `ErrorFeedback` around the
    compressor is taken off. So a rank computes with all its own updates, while others receive them
    bit by bit, with `every=1` too (Xie et al. 2020, "CSER"; Basu et al. 2019, "Qsparse-local-SGD").
    Parameters are then the same on all ranks only after `sync()`, which sends the rest whole. The
    copy takes the parameters' memory once (with `step`, and in `join`, twice), an average twice
    more while it lasts; 16 more bytes compare the copies. An average that is not finite is not
    taken: parameters are those of the copy, and a warning names the rank.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        *,
        every: int,
        start_after: int = 0,
        compression: Compressor | None = None,
    ) -> None:
        super().__init__(module, backend, every=every)
        if start_after < 0:
            raise ValueError(f"start_after must be a number of steps, 0 or more, not {start_after}")
        self.start_after = start_after
        self._check_compression(compression)
        outer = None
        if compression is not None:
            self.compression = deepcopy(
                compression.inner  # residuals stay in the parameters here
                if isinstance(compression, ErrorFeedback)
                else compression.contraction()
            )
            outer = OuterStep(
                self._trained,
                self._dense,
                backend,
                lambda copies: SGD(copies, lr=1.0),  # which goes all the way
                self.compression,
                who="LocalSGD",
                residual=ParameterResidual(),
            )
        self._begin(outer, {"start_after": start_after, "compression": self.compression})


# ------------------------------------------------------------------------------
# DiLoCo: each rank trains by itself; how far the ranks have come is an outer optimizer's gradient.
#
# (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"; 2025,
# "Streaming DiLoCo": outer gradients in 4 bits.)


class DiLoCo(PeriodicSync):
    """A module for which the ranks of `backend` take an outer step after every H-th step.

        model = DiLoCo(
            model, backend, every=100, compression=ErrorFeedback(Quantized(bits=4)),
            outer=lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
        )
        optimizer = torch.optim.AdamW(model.parameters())       # the script goes on unchanged
        ...
        model.sync()                                            # at the end of training

    module       the model; the same on every rank, in structure. Its parameters and buffers are
                 overwritten with rank 0's here, in place, so an optimizer may exist already
    every        optimizer steps between two outer steps; the paper's 500, its rate 0.7 and momentum
                 0.9 are for long runs
    outer        makes the outer optimizer of a list of parameters: any of torch, with the same
                 options on every rank. The result is `.outer_optimizer`
    compression  send outer gradients in another form; a copy is made, `.compression`

    # Notes
    An outer gradient is a rank's progress: its parameters after the last sync, minus those of now.
    Its mean over the ranks is the gradient of a step of the outer optimizer, on copies that are the
    same bits on every rank; the module's parameters become those. With `SGD(params, lr=1)` that is
    `LocalSGD`. The step is part of every H-th `optimizer.step()`, which blocks then. It sends as
    much as `LocalSGD`, or the compressor's messages, and 8 bytes, which compare the copies. Copies
    take the parameters' memory once, besides the outer optimizer's state.

    Counting, `step`, `join`, buffers, optimizers, checkpoints and ranks out of step are as with
    `LocalSGD`.
    `sync()` takes an outer step with the progress so far. A checkpoint has the copies, the outer
    optimizer's state, and each rank's residuals; on another number of ranks, the mean progress
    stays the same.

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
        self._check_compression(compression)
        self.compression = deepcopy(compression)
        self._outer_step = OuterStep(
            self._trained, self._dense, backend, outer, self.compression, who="DiLoCo"
        )
        groups = [
            ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
            for group in self.outer_optimizer.param_groups
        ]
        described = f"{type(self.outer_optimizer).__name__}({'; '.join(groups)})"
        self._begin(self._outer_step, {"outer": described, "compression": compression})

    @property
    def outer_optimizer(self) -> Optimizer:
        """The outer optimizer, for its learning rate; the same on every rank."""
        return self._outer_step.optimizer

    @property
    def skipped_steps(self) -> int:
        """Number of outer steps that were skipped, since their gradient was not finite."""
        return self._outer_step.skipped

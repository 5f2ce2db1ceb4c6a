"""LocalSGD: each rank trains by itself, and parameters are averaged every so many steps.

    t_i  <-  mean of all t_j,  after every H steps                      on every rank i

(Stich 2019, "Local SGD Converges Fast and Communicates Little"; McMahan et al. 2017, "FedAvg".)
"""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.optim import SGD, Optimizer

from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.compression.compressor import check_compressor, check_floating
from phalanx.parallel.local.meeting import MeanOfParameters, Meeting
from phalanx.parallel.local.outer import OuterStep
from phalanx.parallel.local.periodic import Periodic
from phalanx.parallel.local.unsent import Unsent, without_memory


class LocalSGD(Periodic):
    """A module of which the ranks of `backend` average their parameters after every H-th step.

        model = LocalSGD(model, backend, every=8)
        optimizer = torch.optim.AdamW(model.parameters())       # the script goes on unchanged
        ...
        model.sync()                                            # at the end of training

    module       the model; the same on every rank, in structure. Its parameters and buffers are
                 overwritten with rank 0's here, in place, so an optimizer may exist already
    every        optimizer steps between two averages
    start_after  in the first so many steps parameters are averaged after each, and whole: while
                 they change fast (Lin et al. 2020, "post-local SGD")
    compression  send less in each average: `TopK(0.01)`, `PowerSGD(4)`, ...; a copy is made,
                 `.compression`

    The average is part of `optimizer.step()`, which blocks then; all other steps send nothing. It
    sends 2(p-1)/p of the parameters' bytes from each of p ranks: per step an H-th of what DDP
    sends. Right after it parameters are the same bits on all ranks; in between each rank has its
    own: `sync()` averages now, `averaged()` only to look. With `every=1` and SGD, with momentum
    too, it is DDP, to rounding.

    With `compression` a rank sends the compressor's message for how far it is from a copy of the
    parameters that all ranks have alike, and the mean of messages moves the copy. What a message
    leaves out stays in that rank's parameters, ahead of the copy, and so in what it is to send next
    time: that is error feedback, without a residual, and `ErrorFeedback` around the compressor is
    taken off. So a rank computes with all that it has learnt itself, while others hear of it bit by
    bit, and with `every=1` too (Xie et al. 2020, "CSER"; Basu et al. 2019,
    "Qsparse-local-SGD"). Parameters are then the same on all ranks only after `sync()`, which sends
    what is left whole. The copy takes the parameters' memory once, an average twice more while it
    lasts; 16 more bytes compare the copies. An average that is not finite is not taken: parameters
    are those of the copy, and a warning names the rank.

    Averaged are parameters that are trained when the module is wrapped, and floating buffers of the
    state dict; other buffers are rank 0's. Optimizers keep what they have on each rank (momentum,
    Adam's averages). Gradients are each rank's own: clip them as in one process. What is not finite
    on one rank is not finite on any after the average: a warning in the log names it.

    Every rank takes as many steps, or calls `sync()` when it is through: who waits for a rank
    that takes fewer is told so. A step that only one rank's gradient scaler skips puts that rank
    one behind; it is waited for.

    `state_dict` has this rank's parameters, and where ranks have different ones says so in keys of
    its own (`own_state`). A checkpoint (`save_checkpoint`) keeps what each rank has, and what its
    optimizer keeps for it: as many ranks go on bit for bit. Who else loads it, on any number of
    ranks, gets the means, and of the optimizer's state rank 0's.

    Raises `DesyncError`, on every rank, if the ranks' models or options differ, naming the first
    parameter or option that does; `MisuseError` for a module that is wrapped already.
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
        self.compression: Compressor | None = None
        meeting: Meeting = MeanOfParameters(self._trained, backend)
        if compression is not None:
            check_compressor(compression, "LocalSGD(compression=)")
            for parameter in self._trained.values():
                check_floating(parameter, compression)
            self.compression = deepcopy(without_memory(compression))
            meeting = OuterStep(
                *(self._trained, backend, _mean, self.compression),
                who="LocalSGD",
                unsent=Unsent(),
            )
        options = {"start_after": start_after, "compression": self.compression}
        self._begin_with(meeting, options)

    def _period(self) -> int:
        return 1 if self.steps <= self.start_after else self.every

    def _whole(self) -> bool:
        return self.compression is None or self.steps <= self.start_after


def _mean(copies: list[nn.Parameter]) -> Optimizer:
    """An outer optimizer that goes all the way."""
    return SGD(copies, lr=1.0)

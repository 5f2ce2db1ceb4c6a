"""A training step that can be repeated: what it trains, on which samples, and what has to come.

           layers              samples of a rank   ours           torch's, over Gloo
    ddp    6 of 1024 x 1024    32                  phalanx.DDP    DistributedDataParallel
    fsdp   4 of 2048 x 2048    16                  phalanx.FSDP   fully_shard (FSDP2)

Linear layers with ReLU between them, float32, plain SGD. `alone` is the same step without any
communication, on all ranks at the same time.

A stretch of steps begins with the same weights each time, and what the weights are after it is
compared with what one process gets that has all ranks' samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.core.backend import Backend
from phalanx.fsdp import FSDP, ShardingStrategy
from phalanx.tools.bench.operations import Exchange, Operation
from phalanx.tools.bench.peers.peer import Binder, Learner, Peer, Plain

_RATE = 0.5
_TOLERANCE = 0.01
"""Of what training has changed, per tensor: rounding is a hundredth of it."""


class Task(NamedTuple):
    """What is trained: `depth` layers of `width` x `width`, `batch` samples on each rank."""

    width: int
    depth: int
    batch: int

    def make_model(self) -> nn.Module:
        """The same on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for _ in range(self.depth):
                layers += [nn.Linear(self.width, self.width), nn.ReLU()]
            return nn.Sequential(*layers[:-1])

    def samples(self, ranks: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these ranks, one after the other."""
        batches = [
            torch.randn(
                (2, self.batch, self.width), generator=torch.Generator().manual_seed(rank + 1)
            )
            for rank in ranks
        ]
        inputs, targets = torch.cat(batches, dim=1)
        return inputs, targets

    @property
    def layer_bytes(self) -> int:
        """Of one layer's weight and bias."""
        return 4 * self.width * (self.width + 1)

    @property
    def model_bytes(self) -> int:
        """Of all parameters, and of all gradients."""
        return self.depth * self.layer_bytes

    def __str__(self) -> str:
        return (
            f"{self.depth} layers of {self.width} x {self.width}, {self.batch} samples on each rank"
        )


TASKS: Mapping[str, Task] = MappingProxyType(
    {"ddp": Task(1024, 6, 32), "fsdp": Task(2048, 4, 16)},
)


def task_of(operation: str, width: int) -> Task:
    """The task, with layers of another width unless that is 0."""
    task = TASKS[operation]
    return task._replace(width=width) if width else task


class TrainingStep(Exchange):
    """One step a call: forward, backward, and the optimizer's.

    task     what is trained
    wrap     from the plain model to what trains it on this rank
    rank     whose samples these are
    ranks    those whose samples count for the gradients
    """

    def __init__(
        self,
        operation: Operation,
        task: Task,
        wrap: Callable[[nn.Module], Learner],
        *,
        rank: int,
        ranks: range,
    ) -> None:
        super().__init__(operation, None, None, self._step)
        self._task, self._ranks = task, ranks
        self._inputs, self._targets = task.samples(range(rank, rank + 1))
        self._learner = wrap(task.make_model())
        self._optimizer = torch.optim.SGD(self._learner.parameters(), lr=_RATE)
        self._began = False
        self._first: dict[str, Tensor] = {}
        self._expected: dict[int, dict[str, Tensor]] = {}

    def _step(self) -> None:
        _train(self._learner, self._optimizer, self._inputs, self._targets)

    def load(self) -> None:
        """Begin again. Before the first step this remembers with what."""
        if self._began:
            self._learner.rewind()
        else:  # not when it is made: whose peak of memory is measured never comes here
            self._learner.remember()
            self._began = True

    def count_wrong(self, calls: int) -> int:
        """How many parameters are not what one process gets, but for rounding.

        A tensor is judged as a whole, first: a ReLU whose input is next to zero may be open here
        and shut there, and then a few elements of a row differ, though nobody is wrong.
        """
        if not self._first:
            self._first = Plain(self._task.make_model()).whole()
        if calls not in self._expected:
            self._expected[calls] = self._train_in_one_process(calls)
        whole = self._learner.whole()
        wrong = 0
        for name, expected in self._expected[calls].items():
            change = expected - self._first[name]
            off = (whole[name] - expected).abs_()
            if not bool(off.norm() <= _TOLERANCE * change.norm()):  # NaN is wrong, too
                wrong += max(1, int((~(off <= _TOLERANCE * change.abs().max())).sum()))
        return wrong

    def _train_in_one_process(self, calls: int) -> dict[str, Tensor]:
        learner = Plain(self._task.make_model())
        optimizer = torch.optim.SGD(learner.parameters(), lr=_RATE)
        inputs, targets = self._task.samples(self._ranks)
        for _ in range(calls):
            _train(learner, optimizer, inputs, targets)
        return learner.whole()


def _train(
    learner: Learner, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(learner.model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def joint_step(
    peer: Peer, operation: Operation, wrap: Callable[[nn.Module], Learner]
) -> TrainingStep:
    """The step of one rank of those that train together."""
    task = task_of(operation.name, peer.width)
    return TrainingStep(operation, task, wrap, rank=peer.rank, ranks=range(peer.size))


class Alone(Peer):
    """The step of one rank, as if there were no others."""

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Steps."""
        return dict.fromkeys(TASKS, self._step)

    def _step(self, operation: Operation, *_: object) -> Exchange:
        task = task_of(operation.name, self.width)
        ranks = range(self.rank, self.rank + 1)
        return TrainingStep(operation, task, Plain, rank=self.rank, ranks=ranks)


# ------------------------------------------------------------------------------
# Models whose parameters, gradients and optimizer state are shared out over the ranks.
#
# Sharded      phalanx.FSDP, strategy FULL_SHARD, a unit a layer
# FullyShard   torch's `fully_shard` over Gloo, as its documentation recommends: called on each
#              layer, then on the whole


class Sharded(Learner):
    """Phalanx's."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self.model: FSDP = FSDP(
            module, backend, strategy=ShardingStrategy.FULL_SHARD, unit=nn.Linear
        )
        self._first: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Gathers all parameters."""
        self._first = self.whole()

    def rewind(self) -> None:
        """Loads them."""
        self.model.load_state_dict(self._first)

    def whole(self) -> dict[str, Tensor]:
        """Gathers them."""
        return self.model.full_state_dict()


class FullyShard(Learner):
    """Torch's, on its default group."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        # Half a second, which only this measurement should wait for.
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        self.model = module
        self._first: list[Tensor] = []

    def remember(self) -> None:
        """Copies this rank's shards."""
        self._first = [shard.clone() for shard in self._shards()]

    def rewind(self) -> None:
        """Copies them back."""
        with torch.no_grad():
            for shard, value in zip(self._shards(), self._first, strict=True):
                shard.copy_(value)

    def whole(self) -> dict[str, Tensor]:
        """Gathers them."""
        named: Any = self.model.named_parameters()
        return {name: value.detach().full_tensor() for name, value in named}

    def _shards(self) -> list[Tensor]:
        parameters: Any = self.model.parameters()
        return [parameter.to_local().detach() for parameter in parameters]

"""A training step that can be repeated: what it trains, on which samples, and how it is checked.

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
from phalanx.tools.bench.operations import BenchOperation, PreparedCall

_RATE = 0.5
_TOLERANCE = 0.01
"""Of what training has changed, per tensor: rounding is a hundredth of it."""


class TrainingTask(NamedTuple):
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
        shape = (2, self.batch, self.width)
        batches = [
            torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1)) for rank in ranks
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


TASKS: Mapping[str, TrainingTask] = MappingProxyType(
    {"ddp": TrainingTask(1024, 6, 32), "fsdp": TrainingTask(2048, 4, 16)},
)


def task_of(operation: str, width: int) -> TrainingTask:
    """The task, with layers of another width unless that is 0."""
    task = TASKS[operation]
    return task._replace(width=width) if width else task


Tensors = dict[str, Tensor]
"""All parameters, whole, by the names of the plain model."""


class TrainedModel(NamedTuple):
    """A model that trains on this rank, whoever trains it. Every rank calls the functions.

    model     is called with this rank's samples; the optimizer steps its parameters
    whole     returns the parameters
    restore   makes the parameters what they were
    """

    model: nn.Module
    whole: Callable[[], Tensors]
    restore: Callable[[Tensors], object]


def replicated(model: nn.Module, plain: nn.Module | None = None) -> TrainedModel:
    """A model that is whole on each rank: `plain`, inside one that averages gradients, or alone."""

    def whole() -> Tensors:
        named = (model if plain is None else plain).named_parameters()
        return {name: value.detach() for name, value in named}

    def restore(values: Tensors) -> None:
        for name, value in whole().items():
            value.copy_(values[name])

    return TrainedModel(model, whole, restore)


def fully_sharded(module: nn.Module, backend: Backend) -> TrainedModel:
    """`phalanx.FSDP` with the strategy FULL_SHARD, a unit a layer."""
    model = FSDP(module, backend, strategy=ShardingStrategy.FULL_SHARD, unit=nn.Linear)
    return TrainedModel(model, model.full_state_dict, model.load_state_dict)


def fully_sharded_by_torch(module: nn.Module, group: Any) -> TrainedModel:
    """Torch's `fully_shard`, as its documentation recommends: on each layer, then on the whole."""
    # Half a second, which only this measurement should wait for.
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)

    def shards() -> dict[str, Any]:
        return {name: value.detach() for name, value in module.named_parameters()}

    def restore(values: Tensors) -> None:
        for name, shard in shards().items():
            shard.copy_(distribute_tensor(values[name], mesh, shard.placements))

    return TrainedModel(module, lambda: {n: s.full_tensor() for n, s in shards().items()}, restore)


class TrainingStep(PreparedCall):
    """One step a call: forward, backward, and the optimizer's.

    task     what is trained
    wrap     from the plain model to what trains it on this rank
    rank     whose samples these are
    ranks    those whose samples count for the gradients
    """

    def __init__(
        self,
        operation: BenchOperation,
        task: TrainingTask,
        wrap: Callable[[nn.Module], TrainedModel],
        *,
        rank: int,
        ranks: range,
    ) -> None:
        super().__init__(operation, None, None, self._step)
        self._task, self._ranks = task, ranks
        self._inputs, self._targets = task.samples(range(rank, rank + 1))
        self._trained = wrap(task.make_model())
        self._optimizer = torch.optim.SGD(self._trained.model.parameters(), lr=_RATE)
        self._start: Tensors = {}
        self._expected: dict[int, Tensors] = {}

    def _step(self) -> None:
        _train(self._trained.model, self._optimizer, self._inputs, self._targets)

    def load(self) -> None:
        """Begin again. Before the first step this keeps a copy of the parameters."""
        if self._start:
            self._trained.restore(self._start)
        else:  # not when it is made: whose peak of memory is measured never comes here
            self._start = {name: value.clone() for name, value in self._trained.whole().items()}

    def count_wrong(self, calls: int) -> int:
        """How many parameters are not what one process gets, but for rounding.

        A tensor is judged as a whole, first: a ReLU whose input is next to zero may be open here
        and shut there, and then a few elements of a row differ, though nobody is wrong.
        """
        start, after = self._in_one_process(0), self._in_one_process(calls)
        whole = self._trained.whole()
        wrong = 0
        for name, expected in after.items():
            change = expected - start[name]
            off = (whole[name] - expected).abs_()
            if not bool(off.norm() <= _TOLERANCE * change.norm()):  # NaN is wrong, too
                wrong += max(1, int((~(off <= _TOLERANCE * change.abs().max())).sum()))
        return wrong

    def _in_one_process(self, calls: int) -> Tensors:
        if calls not in self._expected:
            model = self._task.make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
            inputs, targets = self._task.samples(self._ranks)
            for _ in range(calls):
                _train(model, optimizer, inputs, targets)
            self._expected[calls] = replicated(model).whole()
        return self._expected[calls]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()

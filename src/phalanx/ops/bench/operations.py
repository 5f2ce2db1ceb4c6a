"""The measured operations: the memory of each, and the values that have to be in it.

Element i of rank r's input is `i % 13 + r + 1`; i counts over the whole of the message. So a result
shows the rank and the place that it is from, and sums stay whole numbers.

Bytes are counted as the NCCL tests do: those of a rank's input or its output, whichever is larger.
Their bus bandwidth (doc/PERFORMANCE.md) is the least load of each rank's link, so that it can be
compared with the machine's limit for any number of ranks: n bytes in t seconds are n / t times
`bus(ranks)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PERIOD = 13


class ValueRange(NamedTuple):
    """`length` elements; the k-th is `scale * ((first + k) % 13) + shift`."""

    first: int
    length: int
    scale: float
    shift: float


Values = tuple[ValueRange, ...]  # of memory, one after the other; none: its values do not matter


def values_of(what: str, r: int, p: int, n: int) -> Values:
    """Return the input or output of rank r of p ranks, for messages of n elements.

    `.../root` is empty except on rank 0, `.../even` except on even ranks.
    """
    what, _, only = what.partition("/")
    if (only == "root" and r != 0) or (only == "even" and r % 2 != 0):
        return ()
    part = n // p

    def from_rank(q: int, first: int = 0, length: int = n) -> ValueRange:
        return ValueRange(first, length, 1, q + 1)

    def summed(first: int, length: int) -> ValueRange:
        return ValueRange(first, length, p, p * (p + 1) / 2)

    table: dict[str, Values] = {
        "nothing": (),
        "own": (from_rank(r),),
        "own part": (from_rank(r, r * part, part),),
        "root's": (from_rank(0),),
        "root's part": (from_rank(0, r * part, part),),
        "even's": (from_rank(r - r % 2),),
        "all parts": tuple(from_rank(q, q * part, part) for q in range(p)),
        "my parts": tuple(from_rank(q, r * part, part) for q in range(p)),
        "sum": (summed(0, n),),
        "sum part": (summed(r * part, part),),
    }
    return table[what]


def elements_of(what: str, p: int, n: int) -> int:
    """Return the number of elements on a rank with this input or output: a part is one of p."""
    if what == "nothing":
        return 0
    return n // p if what.endswith(" part") else n


@dataclass(frozen=True)
class BenchOperation:
    """One row: an operation, for p ranks and messages of n elements."""

    name: str
    given: str  # a rank's input, by a name that `values_of` knows
    expected: str  # its result afterwards
    in_place: bool  # a call overwrites its input, unless other memory is requested
    passes: int  # how often (p-1)/p of the bytes pass a rank's link; 0: all of them pass, once
    trips: int = 1  # messages that one call sends one after the other, of which one is shown
    least: int = 1  # smallest number of calls in a round

    def bus(self, size: int) -> float:
        """Return the factor of the bus bandwidth."""
        return self.passes * (size - 1) / size if self.passes else 1.0

    def fitting(self, size: int, count: int) -> int:
        """Return the number of float32 elements for `count` bytes or more that p divides."""
        if not self.moves:
            return 0
        unit = size if self.sliced else 1
        return -(-count // (4 * unit)) * unit

    @property
    def moves(self) -> bool:
        """Return whether it has messages, of some size."""
        return self.given != "nothing"

    @property
    def sliced(self) -> bool:
        """Return whether messages are cut into one part for each rank."""
        return "part" in self.given + self.expected

    @property
    def training(self) -> bool:
        """Return whether it is a training step, to be compared with the same step alone."""
        return self.name in TASKS


# fmt: off
_ROWS = (
    #              name              gives       gets              in place passes
    BenchOperation("all_reduce",     "own",      "sum",            True,    2),
    BenchOperation("all_gather",     "own part", "all parts",      False,   1),
    BenchOperation("reduce_scatter", "own",      "sum part",       False,   1),
    BenchOperation("broadcast",      "own/root", "root's",         True,    0),
    BenchOperation("all_to_all",     "own",      "my parts",       False,   1),
    BenchOperation("reduce",         "own",      "sum/root",       False,   0),
    BenchOperation("gather",         "own part", "all parts/root", False,   1),
    BenchOperation("scatter",        "own",      "root's part",    False,   1),
    BenchOperation("ping_pong",      "own/even", "even's",         True,    0, trips=2),
    BenchOperation("stream",         "own/even", "even's",         True,    0),
    BenchOperation("barrier",        "nothing",  "nothing",        True,    0),
    BenchOperation("ddp",            "nothing",  "nothing",        True,    0, least=5),
    BenchOperation("fsdp",           "nothing",  "nothing",        True,    0, least=5),
    BenchOperation("copy",           "own",      "own",            False,   0),
)
# fmt: on
OPERATIONS: Mapping[str, BenchOperation] = MappingProxyType({row.name: row for row in _ROWS})
"""Name -> row. `ping_pong` and `stream` are between each even rank and the next one, `ddp` and
`fsdp` training steps, and `copy` what the machine can do."""

EXPANDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"p2p": ("ping_pong", "stream")})
"""What is requested under one name and measured as several."""


def longest_stretch(operation: BenchOperation, size: int, *, in_place: bool) -> int:
    """Return how many calls may follow each other before a check of the result.

    An all_reduce in place multiplies its own result by p in each call, and float32 has to hold it
    to the last bit: a power of two times a small number, or a whole number below 2^24.
    """
    if operation.name != "all_reduce" or not in_place or size < 2:
        return 1000
    largest = size * (PERIOD - 1) + size * (size + 1) // 2
    limit = 1 << (126 if size & (size - 1) == 0 else 24)
    return next(calls for calls in itertools.count(1) if largest * size**calls >= limit)


# ------------------------------------------------------------------------------
# Filling memory with ranks' inputs, and comparing results with the expected ones.

POISON = -1.0  # what memory holds before a call has to overwrite it: no result is negative

_BLOCK = PERIOD << 13  # elements: they stay in a core's cache


def fill(tensor: Tensor, values: Values) -> None:
    """Write values one after the other; an input of None is POISON everywhere."""
    if not values:
        tensor.fill_(POISON)
    for part, block in _blocks(tensor, values, 1.0):
        part.copy_(block)


def count_wrong(tensor: Tensor, values: Values, factor: float = 1.0) -> int:
    """Return the number of elements that are not `factor` times these values, bit for bit."""
    wrong = 0
    for part, block in _blocks(tensor, values, factor):
        if not torch.equal(part, block):
            wrong += int((part != block).sum())
    return wrong


def _blocks(tensor: Tensor, values: Values, factor: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of the tensor, and the values that belong there."""
    begin = 0
    for first, length, scale, shift in values:
        numbers = torch.arange(min(length, _BLOCK), device=tensor.device)
        block = numbers.add_(first % PERIOD).remainder_(PERIOD).to(tensor.dtype)
        block.mul_(scale * factor).add_(shift * factor)
        for start in range(begin, begin + length, _BLOCK):
            part = tensor[start : min(start + _BLOCK, begin + length)]
            yield part, block[: part.numel()]
        begin += length


# ------------------------------------------------------------------------------
# The memory of a message's tensors, and a call on them.

MEMORY_KINDS = ("ordinary", "registered", "fresh", "into")
"""`ordinary` and `registered` (what the backend's `empty` gives, instead of torch's) are in place,
where an operation can be, else into given memory. With `fresh` the result comes in new memory, each
time; with `into` it goes into memory of its own, given with `into=`."""


def kinds_for(operation: BenchOperation, requested: Sequence[str]) -> list[str]:
    """Return the requested kinds of memory that differ for this operation."""
    if not operation.moves or operation.name == "copy":
        return ["ordinary"]
    is_message = operation.name in ("ping_pong", "stream")
    names = [name for name in requested if not (is_message and name == "fresh")]
    if not operation.in_place or is_message:
        names = ["ordinary" if name == "into" else name for name in names]
    return list(dict.fromkeys(names))


@dataclass(eq=False)
class PreparedCall:
    """One operation of one peer on this rank's memory: `call()`, repeated, and then `finish()`."""

    # Made by a peer:
    operation: BenchOperation  # its row, with input and expected output
    n: int  # elements of a whole message
    source: Tensor  # this rank's input; written before calls
    out: Tensor  # its output; checked after calls. The same memory in place
    fresh: bool = False  # `call` returns the result in new memory, which is `out` until the next
    algorithm: str = "auto"  # or one that was requested by name
    call: Callable[[], object] = lambda: None  # runs it once, and blocks as the library's own does
    # Waits until the last has arrived, for calls that return before. Only it and `call` are timed.
    finish: Callable[[], object] = lambda: None
    load: Callable[[], object] = lambda: None  # takes `source` into the library's own memory
    store: Callable[[], object] = lambda: None  # brings the result to `out`
    # Counts wrong elements after so many calls, besides those of `out`.
    count_wrong: Callable[[int], int] = lambda calls: 0
    is_checked: bool = True  # whether its results have a meaning
    own_steps: list[float] = field(default_factory=list)  # seconds of the optimizer in each step
    # Found by `time_rounds`:
    optimizer: float | None = None  # the median of `own_steps`, if any, on the slowest rank
    filled: bool = False  # whether `source` is written; other calls may write to the same memory
    calls: int = 1  # in a round
    seconds: list[float] = field(default_factory=list)  # of a call, by rounds, on the slowest rank
    wrong: int = 0  # elements that came out wrong, on all ranks

    @property
    def in_place(self) -> bool:
        """Return whether calls overwrite their input."""
        return self.source is self.out


# ------------------------------------------------------------------------------
# A training step that can be repeated: its model, its samples, and its check.
#
#            layers              samples of a rank   ours           torch's, over Gloo and Phalanx
#     ddp    6 of 1024 x 1024    32                  phalanx.DDP    DistributedDataParallel
#     fsdp   4 of 2048 x 2048    16                  phalanx.FSDP   fully_shard (FSDP2)
#
# Linear layers with ReLU between them, float32. `alone` is the same step without any communication,
# on all ranks at the same time.

Factory = Callable[..., Optimizer]  # makes an optimizer of parameters
OPTIMIZERS: Mapping[str, Factory] = MappingProxyType(
    {
        "sgd": partial(torch.optim.SGD, lr=0.5),
        "adamw": partial(torch.optim.AdamW, lr=1e-3),
        "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    }
)
STEPS = ("step", "sharded")
"""Ways to train with `phalanx.DDP` beside the plain one, requested as algorithms: in `DDP.step`,
and with a `ShardedOptimizer`."""
_TOLERANCE = 0.01  # of what training has changed, per tensor: rounding is a hundredth of it


class TrainingTask(NamedTuple):
    """A training task: `depth` layers of `width` x `width`."""

    width: int
    depth: int
    batch: int  # samples on each rank
    optimizer: str = "sgd"  # one of `OPTIMIZERS`

    def make_model(self) -> nn.Module:
        """Return the plain model, the same on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for _ in range(self.depth):
                layers += [nn.Linear(self.width, self.width), nn.ReLU()]
            return nn.Sequential(*layers[:-1])

    def samples(self, ranks: range) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these ranks, one after the other."""
        shape = (2, self.batch, self.width)
        batches = [
            torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1)) for rank in ranks
        ]
        inputs, targets = torch.cat(batches, dim=1)
        return inputs, targets

    def __str__(self) -> str:
        text = (
            f"{self.depth} layers of {self.width} x {self.width}, {self.batch} samples on each rank"
        )
        return text if self.optimizer == "sgd" else f"{text}, {self.optimizer}"


TASKS: Mapping[str, TrainingTask] = MappingProxyType(
    {"ddp": TrainingTask(1024, 6, 32), "fsdp": TrainingTask(2048, 4, 16)}
)


def task_of(operation: str, width: int, optimizer: str = "sgd") -> TrainingTask:
    """Return the task with this optimizer, and with layers of another width unless that is 0."""
    task = TASKS[operation]._replace(optimizer=optimizer)
    return task._replace(width=width) if width else task


Tensors = dict[str, Tensor]  # all parameters, whole, by the names of the plain model


def _backward(loss: Callable[[], Tensor]) -> None:
    loss().backward()  # type: ignore[no-untyped-call]


class TrainedModel(NamedTuple):
    """A model that trains on this rank, with any library. Every rank calls the functions."""

    model: nn.Module  # is called with this rank's samples
    whole: Callable[[], Tensors]  # returns the parameters
    restore: Callable[[Tensors], object]  # gives the parameters their former values
    average: Callable[[], object] = lambda: None  # between backward and the optimizer's step
    # Runs the forward pass, which returns the mean over this rank's samples, and backward.
    passes: Callable[[Callable[[], Tensor]], object] = _backward
    # Makes the optimizer from its factory; None: of the model's parameters.
    optimizer: Callable[[Factory], Optimizer] | None = None


Wrap = Callable[[nn.Module], TrainedModel]  # turns the plain model into one that is trained here


def replicated(model: nn.Module, plain: nn.Module | None = None) -> TrainedModel:
    """Return a model that is whole on each rank, inside a wrapper that averages, or alone."""
    plain = model if plain is None else plain
    return TrainedModel(model, plain.state_dict, plain.load_state_dict)


class TrainingStep:
    """Forward, backward, and the optimizer's step.

    A stretch of steps begins with the same weights each time. The weights after it are compared
    with those of one process with the samples of all `ranks`, whose gradients count; this one is
    `rank`. `own_steps` has the seconds that the optimizer's own step took in each step: with a
    `ShardedOptimizer`, without the messages.
    """

    def __init__(self, task: TrainingTask, wrap: Wrap, *, rank: int, ranks: range) -> None:
        self._task, self._ranks = task, ranks
        self._trained = wrap(task.make_model())
        self._start: Tensors = {}
        self._expected: dict[int, Tensors] = {}
        self.own_steps: list[float] = []
        optimizer = _make_optimizer(task, self._trained)
        self._own = getattr(optimizer, "inner", optimizer)  # which steps on this rank's parameters
        self._time_optimizer()
        self.call = _stepper(self._trained, optimizer, *task.samples(range(rank, rank + 1)))

    def load(self) -> None:
        """Begin again. Before the first step this keeps a copy of the parameters."""
        if self._start:
            self._trained.restore(self._start)
        else:  # not when it is made: a peak of memory is measured without a copy
            self._start = {name: value.clone() for name, value in self._trained.whole().items()}
        self._own.state.clear()

    def _time_optimizer(self) -> None:
        began = 0.0

        def begin(*_: object) -> None:
            nonlocal began
            began = perf_counter()

        def end(*_: object) -> None:
            self.own_steps.append(perf_counter() - began)

        self._own.register_step_pre_hook(begin)
        self._own.register_step_post_hook(end)

    def count_wrong(self, calls: int) -> int:
        """Return the number of parameters that differ from one process's by more than rounding.

        A tensor is judged as a whole, first: a ReLU whose input is next to zero may be open here
        and shut there, and then a few elements of a row differ without an error.
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
            trained = replicated(self._task.make_model())
            optimizer = _make_optimizer(self._task, trained)
            step = _stepper(trained, optimizer, *self._task.samples(self._ranks))
            for _ in range(calls):
                step()
            self._expected[calls] = trained.whole()
        return self._expected[calls]


def _make_optimizer(task: TrainingTask, trained: TrainedModel) -> Optimizer:
    factory, make = OPTIMIZERS[task.optimizer], trained.optimizer
    return make(factory) if make else factory(trained.model.parameters())


def _stepper(
    trained: TrainedModel, optimizer: Optimizer, inputs: Tensor, targets: Tensor
) -> Callable[[], None]:
    def loss() -> Tensor:
        return nn.functional.mse_loss(trained.model(inputs), targets)

    def step() -> None:
        optimizer.zero_grad()
        trained.passes(loss)
        trained.average()
        optimizer.step()

    return step

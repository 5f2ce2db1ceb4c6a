"""One training program, for a rank and for one process alone; features say what is different in it.

    build -> wrap -> make optimizers -> 3 steps of (passes -> update) -> the whole model's state

A `Job` is one run of it. On a rank it has a backend, and its model is wrapped. Without one it is
what ranks are compared with: the plain model on the joined batch. Each step of the program is a
*point*: a feature that has a method of that name stands around what the program does there.

    def update(self, job, inner):       # of a feature: clip, then go on
        job.clip(0.1)
        inner()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from models import HEAD, Block, data_of
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.tensor import full_state_dict

if TYPE_CHECKING:
    from features import Feature
    from wrappers import Way

STEPS = 3
ROWS = 4  # of each part of a batch
RATE = 0.1
State = dict[str, Tensor]
_BUILDING = threading.RLock()  # the default dtype is that of all ranks that are threads


class Note(NamedTuple):
    """A value that has to be the same as in one process."""

    label: str
    value: Tensor


class Job:
    """One run of the program.

    backend   None: one process, with the plain model
    part      which rank's part of the batch is computed now, counted along the data axis
    parts     whose parts this job computes: a rank its own; one process all of them
    model     what is trained; `plain` is what it was before it was wrapped
    call      what a forward pass calls: the model, or what stands for it (compiled, say)
    kept      what features remember between points
    exact     without the rounding of autocast and of bfloat16
    """

    def __init__(
        self,
        way: Way,
        features: Sequence[Feature],
        folder: Path,
        *,
        backend: phalanx.Backend | None = None,
        part: int | None = None,
        exact: bool = False,
    ) -> None:
        self.way, self.features, self.folder, self.backend = way, list(features), folder, backend
        self.mesh: phalanx.DeviceMesh | None = None
        self.data: phalanx.Backend | None = None  # the ranks that have other parts of the batch
        self.parts = list(range(way.parts)) if part is None else [part]
        self.part = self.parts[0]
        self.joined = any(feature.joined for feature in features)
        self.exact = exact
        self.dtype = torch.float64
        self.seed = 0
        self.steps = STEPS
        self.factor = 1.0  # of the loss
        self.averages = 1  # backward passes of a step that are averaged
        self.number = 0
        self.taken = 0  # steps of optimizers
        self.rate = RATE
        self.outer_momentum = True  # of DiLoCo
        self.shift = 0  # of the seed, where values come from elsewhere
        self.device = "cpu"
        self.first: State = {}  # the whole state before the first step, in one process
        self.model: Any = None
        self.plain: Any = None
        self.call: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.kept: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.states: dict[str, State] = {}
        self.under_way: Any = None  # `step` of the wrapper
        self.rows = ROWS  # of the forward pass
        self.before: State = {}  # this rank's parameters at the beginning of the step

    def __deepcopy__(self, _: object) -> Job:
        return self  # layers ask it for the part

    @property
    def alone(self) -> bool:
        """Whether this is one process, without ranks."""
        return self.backend is None

    def through(self, point: str, inner: Callable[..., Any], *args: Any) -> Any:
        """Do what the program does at a point, inside of what features do there."""
        for feature in reversed(self.features):
            method = getattr(feature, point, None)
            if method is not None:
                inner = partial(method, self, inner)
        return inner(*args)

    # Before training ------------------------------------------------------------------------

    def begin(self, seed: int) -> None:
        """Build the model, wrap it, and make its optimizers."""
        self.seed = seed
        with _default_dtype(self.dtype), torch.device(self.device):
            torch.manual_seed(seed)
            layers: dict[str, nn.Module] = {"stem": nn.Linear(4, 6), "first": Block()}
            for feature in self.features:
                feature.layers(self, layers)
            layers |= {"second": Block(), "head": nn.Linear(6, HEAD)}
            self.plain = self.through("build", lambda: _sequential(layers))
        self.model = self.plain if self.alone else self.way.wrap(self, self.plain)
        self.call = self.model
        if self.alone and self.way.local:  # what a sync is of
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.kept["trained"] = trained, [p.detach().clone() for p in trained]
        self.through("ready", lambda: None)
        self.optimizers = self.through("make_optimizers", self._sgd, list(self.model.parameters()))
        self.through("started", lambda: None)

    def _sgd(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)] if parameters else []

    def options(self) -> dict[str, Any]:
        """What features ask of the wrapper."""
        found: dict[str, Any] = self.through("options", dict)
        return found

    # Training -------------------------------------------------------------------------------

    def train(self) -> Iterator[None]:
        """The program; stops after each step."""
        if not self.alone:
            self.way.meet(self)
        for feature in self.features:
            feature.prepare(self)
        # The values of rank 0 count where ranks have a model each.
        self.begin(0 if self.alone else self.way.place(self) + self.shift)
        if self.alone:
            self.first = self.whole(self.model)
        with ExitStack() as around:
            for feature in self.features:
                around.enter_context(feature.training(self))
            while self.number < self.steps:
                self.before = self.values()
                self.through("step", self.step)
                self.through("after_step", lambda: None)
                self.number += 1
                yield
        if not self.alone and self.way.local:
            self.model.sync()
        yield
        self.through("finish", lambda: None)
        self.states[""] = self.whole(self.model)

    def step(self) -> None:
        """One step: gradients of a batch, and what optimizers make of them."""
        self.zero_grad()
        self.through("passes", self.one_pass, slice(None))
        self.through("update", self.update)

    def zero_grad(self) -> None:
        self.through("zero_grad", self.model.zero_grad)

    def update(self) -> None:
        """All optimizers take a step."""
        for optimizer in self.optimizers:
            self.through("optimizer_step", lambda one: one.step(), optimizer)
        self.taken += 1

    def batch(self, part: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Rows of a part's batch of this step."""
        x, y = self.through("batch_of", lambda p: data_of(p, self.number, ROWS, self.dtype), part)
        return x[rows], y[rows]

    def one_pass(self, rows: slice) -> None:
        """Forward and backward of the batches of this job's parts: of their joined batch."""
        batches = {part: self.batch(part, rows) for part in self.parts if self.has_batch(part)}
        if self.way.pipeline and not self.alone:
            ((self.part, (x, y)),) = batches.items()
            self.through("train_step", self._train_step, x, y)
            return
        if self.joined and len(batches) > 1:
            x, y = (torch.cat(tensors) for tensors in zip(*batches.values(), strict=True))
            batches = {0: (x, y)}
        total = sum(len(x) for x, _ in batches.values())
        for part, (x, y) in batches.items():
            self.part = part
            out = self.through("forward", self.call, x)
            loss = self.through("loss", self.loss, out, y)
            self.rows = len(y)
            if self.alone:
                loss = loss * (len(x) / total)
            self.through("backward", self.backward, loss)

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self.under_way is not None:  # a step of a joined batch takes sums
            loss, of = loss * self.rows, self.under_way
            of.backward(loss, **options)
        else:
            loss.backward(**options)  # type: ignore[no-untyped-call]

    def has_batch(self, part: int) -> bool:
        """Whether that part has a batch in this step."""
        return all(feature.has_batch(self, part) for feature in self.features)

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.factor

    def _train_step(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.model.train_step(
            x, y, lambda out, target: self.through("loss", self.loss, out, target)
        )
        return found

    # What wrappers have, and one process has not -----------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """The wrapper's; nothing where it has none, and backward passes send nothing."""
        wrapper = getattr(self.model, "no_sync", None)
        if self.alone or wrapper is None:
            return nullcontext()
        context: AbstractContextManager[None] = wrapper()
        return context

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of all gradients, as this wrapper's page in the docs says."""
        clip: Any = torch.nn.utils.clip_grad_norm_
        if self.alone or (self.way.local and not self.way.tensor):
            return clip(list(self.model.parameters()), max_norm)  # type: ignore[no-any-return]
        return phalanx.clip_grad_norm_(self.model, max_norm)

    # What is compared ---------------------------------------------------------------------------

    def values(self) -> State:
        """Copies of this rank's parameters."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def whole(self, model: Any) -> State:
        """The state of the plain model; of a pipeline this rank's layers. Every rank calls it."""
        state = model.state_dict() if self.alone else full_state_dict(model)
        found = {name: value.detach().clone() for name, value in state.items() if "@" not in name}
        return {name.removeprefix("module."): value for name, value in found.items()}

    def note(self, label: str, value: Tensor | float) -> None:
        """Something that has to be as in one process."""
        self.notes.append(Note(f"{label} in step {self.number}", torch.as_tensor(value).detach()))

    def check(self, right: bool, problem: str) -> None:
        """Something that has to be so on ranks."""
        assert right or self.alone, f"rank {self.part}, step {self.number}: {problem}"


def _sequential(layers: dict[str, nn.Module]) -> nn.Sequential:
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with _BUILDING:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

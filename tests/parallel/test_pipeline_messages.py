"""Messages between stages: how many, which ranks wait for them, and what is kept meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import CLUSTERS
from ddp_models import seeded
from ddp_runs import outcome_of
from pipeline_checker import ALIVE
from pipeline_runs import SCHEDULES, SIZE, batch, deep, piped
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    Backend,
    MisuseError,
    PeerLostError,
    UnsupportedObjectError,
    UnsupportedOperationError,
    simulate,
)
from phalanx.core.posted import Wait
from phalanx.errors import MalformedObjectError
from phalanx.pipeline.stage_p2p import FIRST_TAG, MessageLayout
from phalanx.wire.codec import encode

FREE = {
    cluster.name: cluster for cluster in CLUSTERS if cluster.name in ("simulated", "tcp", "shm")
}
ROW = SIZE * 4  # bytes of one sample between two layers
PATIENCE = 20.0


def mean(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


class Sent:
    """Writes down the pipeline's messages that a backend sends: their sizes."""

    def __init__(self, backend: Backend) -> None:
        self.sizes: list[int] = []
        isend = backend.isend

        def watched(data: Any, dst: int, *, tag: int = 0, **options: Any) -> Any:
            if tag >= FIRST_TAG:
                self.sizes.append(data.nbytes if isinstance(data, Tensor) else len(data))
            return isend(data, dst, tag=tag, **options)

        backend.isend = watched  # type: ignore[method-assign]

    def take(self) -> list[int]:
        sizes, self.sizes = self.sizes, []
        return sizes


def test_layouts_are_sent_before_the_first_micro_batch_of_a_kind_and_not_again() -> None:
    def run(backend: Backend) -> None:
        sent, pipeline = Sent(backend), piped(backend, deep())

        def messages(rows: int, call: Callable[..., Tensor]) -> tuple[list[int], int]:
            call(*batch(rows), F.mse_loss)
            sizes = sent.take()
            tensors = [size for size in sizes if size in (2 * ROW, 3 * ROW)]
            return tensors, len(sizes) - len(tensors)

        twos = [2 * ROW] * 4
        assert messages(8, pipeline.train_step) == (twos, 2), "how long, and the layout"
        for _ in range(3):
            assert messages(8, pipeline.train_step) == (twos, 0)
        mixed = sorted([2 * ROW, 3 * ROW] * 2)
        tensors, layouts = messages(10, pipeline.train_step)
        assert (sorted(tensors), layouts) == (mixed, 2), "of micro-batches of three"
        tensors, layouts = messages(10, pipeline.train_step)
        assert (sorted(tensors), layouts) == (mixed, 0)
        if backend.rank == 0:  # the last rank sends gradients only
            assert messages(8, pipeline.evaluate) == (twos, 2)
            assert messages(8, pipeline.evaluate) == (twos, 0)
        else:
            pipeline.evaluate(*batch(8), F.mse_loss)
            pipeline.evaluate(*batch(8), F.mse_loss)
            assert sent.take() == []
        assert messages(8, pipeline.train_step) == (twos, 0)

    simulate(run, 2)


def test_layers_after_frozen_ones_that_need_no_gradient_send_none_back() -> None:
    def run(backend: Backend) -> list[int]:
        layers = deep()
        for parameter in layers[:6].parameters():
            parameter.requires_grad_(False)
        sent, pipeline = Sent(backend), piped(backend, layers)
        for _ in range(2):
            sent.take()
            pipeline.train_step(*batch(8), F.mse_loss)
        return sent.take()

    assert simulate(run, 2) == [[2 * ROW] * 4, []]


@pytest.mark.parametrize("kind", FREE)
def test_a_rank_that_sends_goes_on_while_the_receiver_still_computes(kind: str) -> None:
    """1F1B with four stages: the first one gets three passes ahead of a second one that is busy."""
    ahead = threading.Event()
    width = 1 << 18  # 2 MiB a message: more than goes as a copy to who has not asked

    class First(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                ahead.set()
            return x * 2

    class Second(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert ahead.wait(PATIENCE), "the first stage waits for this one"
            return x * 2

    def run(backend: Backend) -> list[str]:
        waited, wait = [], backend.engine.wait

        def watched(until: Wait) -> None:
            if until.name == "send" and first.calls < 4:
                waited.append(until.describe())
            wait(until)

        backend.engine.wait = watched  # type: ignore[method-assign]
        first = First()
        layers = [first, Second(), nn.Identity(), nn.Linear(width, 1, bias=False)]
        piped(backend, layers, 4).train_step(torch.ones(8, width), torch.ones(8), mean)
        return waited

    assert FREE[kind].run(run, 4)[0] == []


@pytest.mark.parametrize("kind", FREE)
def test_what_comes_next_is_being_received_while_a_stage_computes(kind: str) -> None:
    class Looks(nn.Module):
        def __init__(self, backend: Backend) -> None:
            super().__init__()
            self.backend, self.seen = backend, []

        def forward(self, x: Tensor) -> Tensor:
            under_way = [work.name for work in self.backend.group.under_way()]
            self.seen.append("recv" in under_way)
            go_on.release()
            return x

    class Waits(nn.Module):
        """Lets the last stage begin with one micro-batch before it gives it the next."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                assert go_on.acquire(timeout=PATIENCE)
            return x * 2

    go_on = threading.Semaphore(0)

    def run(backend: Backend) -> list[bool]:
        looks = Looks(backend)
        head = nn.Sequential(looks, nn.Linear(SIZE, SIZE))
        pipeline = piped(backend, [Waits(), head], 6, "gpipe")
        pipeline.train_step(*batch(6), F.mse_loss)
        return looks.seen

    seen = FREE[kind].run(run, 2)[1]
    assert seen[1:5] == [True] * 4, "the layout is known after the first"


class Token:
    """Lives as long as the activations of a micro-batch."""


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, living: weakref.WeakSet[Token], most: list[int]) -> Tensor:
        ctx.token = Token()
        living.add(ctx.token)
        most.append(len(living))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class Counts(nn.Module):
    """How many micro-batches' activations live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.living: weakref.WeakSet[Token] = weakref.WeakSet()
        self.most: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return Keeps.apply(self.linear(x), self.living, self.most)


@pytest.mark.checkered
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (3, 2), (3, 7), (4, 8)])
def test_the_schedule_decides_how_many_activations_live(
    schedule: str, stages: int, micro_batches: int
) -> None:
    def run(backend: Backend) -> tuple[int, int]:
        layers = [Counts() for _ in range(8)]
        pipeline = piped(backend, layers, micro_batches, schedule)
        for _ in range(2):
            pipeline.train_step(*batch(micro_batches), F.mse_loss)
        assert not any(layer.living for layer in layers)
        if pipeline.config.chunks == 1:
            lived = {max(layer.most) for layer in layers if layer.most}
            assert max(lived) == pipeline.peak_activations
            assert len(lived) == 1 or schedule == "zb_h1", "B frees what W does not need"
        return pipeline.peak_activations, pipeline.config.chunks

    for i, (most, v) in enumerate(simulate(run, stages)):
        assert most == ALIVE[schedule](i, stages, micro_batches, v)
        if schedule == "1f1b":
            assert most <= stages


def test_what_has_been_sent_is_not_kept_for_the_backward_pass() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert [ref() for ref in outputs] == [None] * len(outputs)
            y = super().forward(x)
            outputs.append(weakref.ref(y))
            return y

    def run(backend: Backend) -> None:
        layers = [Last(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
        piped(backend, layers, 4, "gpipe").train_step(*batch(8), F.mse_loss)

    simulate(run, 2)
    assert len(outputs) == 4


class OnlyPositive(nn.Module):
    """Its output's shape depends on the values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, x.sum(0) > 0].sum(1, keepdim=True) if self.training else x[:, x.sum(0) > 0]


def test_shapes_that_depend_on_values_are_refused_and_what_they_may_depend_on_is_said() -> None:
    inputs = torch.ones(4, SIZE)
    inputs[2:, 3:] = -1

    def run(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, [OnlyPositive(), nn.Identity()], 2)
        return outcome_of(lambda: pipeline.evaluate(inputs, inputs, mean))

    results = simulate(run, 2)
    assert isinstance(results[0], UnsupportedOperationError)
    said = str(results[0])
    assert "rank 0: the outputs of stage 0 (layer 0) of micro-batch 1 are (float32 [2, 3])" in said
    assert "those of the first one like it were (float32 [2, 6])" in said
    assert isinstance(results[1], UnsupportedOperationError)
    assert "rank 0" in str(results[1])


class Says(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), {"also": self.what}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a word", "['also'] is a str"),
        (3, "['also'] is a int"),
        (torch.ones(2).to_sparse(), "['also'] is not a dense tensor (torch.sparse_coo)"),
        (torch.max(torch.ones(2, 2), 0), "['also'] is a max"),
    ],
)
def test_what_cannot_be_passed_on_is_named(what: Any, named: str) -> None:
    def run(backend: Backend) -> BaseException | None:
        layers = [Says(what), nn.Identity()]
        pipeline = piped(backend, layers, 2)
        return outcome_of(lambda: pipeline.train_step(*batch(4), F.mse_loss))

    first, second = simulate(run, 2)
    assert isinstance(first, UnsupportedObjectError)
    assert f"the outputs of stage 0 (layer 0)[1]{named}" in str(first)
    assert "F0 of stage 0 (layer 0)" in str(second)


def test_a_gradient_that_is_missing_for_once_counts_as_zeros() -> None:
    class Sometimes(nn.Module):
        calls = 0

        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            self.calls += 1
            return given[0] + given[1] if self.calls % 2 else given[0]

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    def build() -> nn.Sequential:
        return nn.Sequential(Heads(), Sometimes())

    plain = seeded(build)
    for x, y in zip(*(part.chunk(2) for part in batch(4)), strict=True):
        (F.mse_loss(plain(x), y) / 2).backward()

    def run(backend: Backend) -> None:
        pipeline = piped(backend, seeded(build), 2)
        pipeline.train_step(*batch(4), F.mse_loss)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    simulate(run, 2)


def test_the_bubble_is_measured_beside_the_theory() -> None:
    def run(backend: Backend) -> Any:
        pipeline = piped(backend, deep(), 6)
        with pytest.raises(MisuseError, match="no train_step yet"):
            pipeline.pipeline_bubble()
        pipeline.train_step(*batch(12), F.mse_loss)
        return pipeline.pipeline_bubble()

    bubbles = simulate(run, 3)
    assert all(bubble == bubbles[0] for bubble in bubbles)
    assert bubbles[0].theory == pytest.approx(2 / 8)
    assert 0 < bubbles[0].measured < 1
    assert str(bubbles[0]).endswith("in theory 25.0%")


def test_messages_of_the_user_s_own_and_of_pipelines_do_not_meet() -> None:
    def run(backend: Backend) -> float:
        other = 1 - backend.rank
        mine = torch.full((5,), float(backend.rank))
        backend.send(mine, other, tag=7)
        loss = piped(backend, deep()).train_step(*batch(8), F.mse_loss)
        into = torch.empty(5)
        backend.recv(into, other, tag=7)
        assert into.tolist() == [other] * 5
        return loss.item()

    assert simulate(run, 2)[0] == pytest.approx(F.mse_loss(deep()(batch(8)[0]), batch(8)[1]).item())


def test_a_lost_peer_is_named_by_all_that_are_left() -> None:
    class Dies(nn.Module):
        def __init__(self, backend: Backend) -> None:
            super().__init__()
            self.backend = backend

        def forward(self, x: Tensor) -> Tensor:
            self.backend.abort()
            return x

    def run(backend: Backend) -> BaseException | None:
        layers = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), Dies(backend)]
        pipeline = piped(backend, layers, 3)
        return outcome_of(lambda: pipeline.train_step(*batch(6), F.mse_loss))

    first, second, _ = simulate(run, 3)
    for rank, error in enumerate((first, second)):
        assert isinstance(error, PeerLostError)
        assert error.peer == 2
        assert f"Pipeline: rank {rank} was in " in str(error)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (3, "no layout of tensors"),
        ((0, [("float32", [2, "3"], True)]), "no layout of tensors"),
        ((0, [("float32", [2])]), "no layout of tensors"),
        ((0, [("float7", [2], False)]), "dtypes that are not known"),
    ],
)
def test_what_is_no_layout_is_refused(content: object, problem: str) -> None:
    with pytest.raises(MalformedObjectError, match=problem):
        MessageLayout.decode(encode(content))


def test_a_layout_survives_its_bytes() -> None:
    tree = ([torch.zeros(2, 3, requires_grad=True), None], {"mask": torch.ones(4).bool()})
    layout, _ = MessageLayout.of(tree, "outputs")
    assert MessageLayout.decode(layout.encode()) == layout

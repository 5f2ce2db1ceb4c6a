"""Pipelines and their replicas, with weights: gradients of the joined batch, as in one process.

All in double precision: the norm of a difference is at most 1e-12 of the reference's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from clusters import Cluster, Cooperative, Tcp
from ddp_models import seeded
from ddp_runs import outcome_of
from pipeline_runs import SCHEDULES, SIZE, piped
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    DeviceMesh,
    ErrorFeedback,
    GradScaler,
    LocalSGD,
    MisuseError,
    PeerLostError,
    Pipeline,
    ShardingStrategy,
    SizeMismatchError,
    SyncBatchNorm,
    TopK,
    clip_grad_norm_,
    parallelize,
    simulate,
)
from phalanx.parallel.wrapper import Slice, slices_in

Wrap = Callable[[nn.Module, Backend], nn.Module]
WRAPS: dict[str, Wrap] = {
    "DDP": DDP,
    "FSDP": FSDP,
    "SHARD_GRAD_OP": lambda layer, data: FSDP(layer, data, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "both": lambda layer, data: (DDP if layer.weight[0, 0] > 0 else FSDP)(layer, data),  # type: ignore[operator, index]
    "NO_SHARD": lambda layer, data: FSDP(layer, data, strategy=ShardingStrategy.NO_SHARD),
}
IGNORED = -100
STEPS = [
    (3, 2, 5),
    (0, 4, 2),
    (0, 2, 3),
    (2, 0, 3),
    (4, 2, 0),
    (0, 0, 3),
]  # samples of each replica
Batch = tuple[Tensor, Tensor]


def model() -> nn.Sequential:
    def build() -> nn.Module:
        layers = (nn.Linear(SIZE, SIZE) if n % 2 == 0 else nn.Tanh() for n in range(12))
        return nn.Sequential(*layers)

    layers = seeded(build, 0).double()
    assert isinstance(layers, nn.Sequential)
    return layers


def batch(replica: int, samples: int, seed: int) -> Batch:
    """Some of the targets, in most of the samples, do not count."""
    draws = torch.Generator().manual_seed(100 * seed + replica)
    targets = torch.randint(SIZE, (samples, 3), generator=draws)
    ignored = torch.rand(samples, 3, generator=draws) < 0.4
    inputs = torch.randn(samples, 3, SIZE, generator=draws, dtype=torch.float64)
    return inputs, targets.masked_fill(ignored, IGNORED)


def tokens(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return nn.functional.cross_entropy(outputs, targets, reduction="sum", ignore_index=IGNORED)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def plainly(steps: Sequence[Sequence[int]]) -> tuple[list[Any], dict[str, Tensor]]:
    """Of each step the loss, the norm and the gradients, clipped; and the parameters at the end."""
    plain, found = model(), []
    optimizer = sgd(plain.parameters())
    for seed, sizes in enumerate(steps):
        parts = [batch(replica, samples, seed) for replica, samples in enumerate(sizes)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = sum_of_losses(plain(inputs), targets) / tokens(targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        gradients = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        found.append((loss.item(), norm.item(), gradients))
        optimizer.step()
    return found, dict(plain.state_dict())


def replica_of(
    backend: Backend, wrap: Wrap, replicas: int, schedule: str = "1f1b", layers: Any = None
) -> tuple[Pipeline, DeviceMesh]:
    mesh = DeviceMesh(backend, (replicas, backend.world_size // replicas), ("data", "stage"))
    wrapped = [
        wrap(layer, mesh["data"]) if list(layer.parameters()) else layer
        for layer in layers or model()
    ]
    return piped(mesh["stage"], wrapped, 2, schedule, replicas=mesh["data"]), mesh


def step(
    pipeline: Pipeline, mesh: DeviceMesh, sizes: Sequence[int], seed: int, **given: Any
) -> Any:
    """One step, in which a replica without samples has no batch at all."""
    replica = mesh["data"].rank
    inputs, targets = batch(replica, sizes[replica], seed) if sizes[replica] else (None, None)
    weight = tokens(targets) if targets is not None else 0
    return pipeline.train_step(inputs, targets, sum_of_losses, weight=weight, **given)


def assert_near(found: Tensor, expected: Tensor, name: str = "") -> None:
    assert (found - expected).norm() <= 1e-12 * expected.norm(), name


def assert_parts(pipeline: Pipeline, whole: dict[str, Tensor], of: str = "grad") -> None:
    """This rank's parts of gradients, or of parameters, are those of whole ones."""
    parts = slices_in(pipeline)
    for name, parameter in pipeline.named_parameters():
        expected = whole[name].flatten()
        part = parts.get(parameter, Slice.whole(parameter.shape))
        found = parameter.grad if of == "grad" else parameter.detach()
        assert found is not None
        difference = found.flatten() - expected[part.start : part.stop]
        assert difference.norm() <= 1e-12 * expected.norm(), name


# The numbers of one process ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("DDP", schedule) for schedule in SCHEDULES),
        *(("FSDP", schedule) for schedule in SCHEDULES),
        ("both", "1f1b"),
        ("SHARD_GRAD_OP", "zb_h1"),
        ("NO_SHARD", "interleaved_1f1b"),
    ],
)
def test_replicas_with_any_weights_train_as_one_process(name: str, schedule: str):
    """Gradients, losses, norms and parameters; with replicas that are empty in any step."""
    expected, state = plainly(STEPS)

    def run(backend: Backend) -> list[float]:
        pipeline, mesh = replica_of(backend, WRAPS[name], 3, schedule)
        optimizer, losses = sgd(pipeline.parameters()), []
        for seed, sizes in enumerate(STEPS):
            optimizer.zero_grad()
            loss = step(pipeline, mesh, sizes, seed).item()
            norm = clip_grad_norm_(pipeline, 0.1).item()
            assert (loss, norm) == pytest.approx(expected[seed][:2], rel=1e-12)
            assert_parts(pipeline, expected[seed][2])
            optimizer.step()
            losses.append(loss)
        assert_parts(pipeline, state, of="values")
        return losses

    first, *others = simulate(run, 6)
    assert all(losses == first for losses in others), "the same bits on every rank"


@pytest.mark.parametrize("where", [Cooperative(), Tcp()], ids=str)
@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_over_tcp_as_well(name: str, where: Cluster):
    expected, _ = plainly([(3, 2), (0, 4)])
    models = [model() for _ in range(4)]

    def run(backend: Backend) -> None:
        layers = models[backend.rank]
        pipeline, mesh = replica_of(backend, WRAPS[name], 2, layers=layers)
        optimizer = sgd(pipeline.parameters())
        for seed, sizes in enumerate([(3, 2), (0, 4)]):
            optimizer.zero_grad()
            assert step(pipeline, mesh, sizes, seed).item() == pytest.approx(
                expected[seed][0], rel=1e-12
            )
            clip_grad_norm_(pipeline, 0.1)
            assert_parts(pipeline, expected[seed][2])
            optimizer.step()

    where.run(run, 4)


@pytest.mark.parametrize("given_on", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_of_one_pipeline_count_by_what_is_in_them(schedule: str, given_on: int):
    """Without replicas; the weight is given on one rank only."""
    expected, _ = plainly([(7,)])
    inputs, targets = batch(0, 7, 0)

    def run(backend: Backend) -> float:
        pipeline = piped(backend, model(), 3, schedule)
        weight = tokens(targets) if backend.rank == given_on else None
        loss = pipeline.train_step(inputs, targets, sum_of_losses, weight=weight)
        assert loss.dtype == torch.float64
        clip_grad_norm_(pipeline, 0.1)
        assert_parts(pipeline, expected[0][2])
        return loss.item()

    assert simulate(run, 2) == pytest.approx([expected[0][0]] * 2, rel=1e-12)


def test_a_batch_of_which_nothing_counts_is_not_used():
    """Only the rank with the targets knows; NaN in the batch is nobody's."""
    expected, _ = plainly([(0, 3)])

    def run(backend: Backend) -> None:
        pipeline, mesh = replica_of(backend, DDP, 2)
        inputs, targets = batch(mesh["data"].rank, 3, 0)
        weight = tokens(targets)
        if mesh["data"].rank == 0:
            inputs, targets, weight = inputs * math.nan, targets.fill_(IGNORED), 0
        given = weight if mesh["stage"].rank == 1 else None
        pipeline.train_step(inputs, targets, sum_of_losses, weight=given)
        clip_grad_norm_(pipeline, 0.1)
        assert_parts(pipeline, expected[0][2])

    simulate(run, 4)


def test_gradients_of_several_steps_are_added_up():
    expected = [sums_of_gradients([(3, 2)]), sums_of_gradients([(3, 2), (0, 4)])]

    def run(backend: Backend) -> None:
        for wrap in (DDP, FSDP):
            pipeline, mesh = replica_of(backend, wrap, 2)
            for seed, sizes in enumerate([(3, 2), (0, 4)]):
                step(pipeline, mesh, sizes, seed)
                assert_parts(pipeline, expected[seed])

    simulate(run, 4)


def sums_of_gradients(steps: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The sums of the plain model's gradients in these steps."""
    plain = model()
    for seed, sizes in enumerate(steps):
        parts = [batch(replica, samples, seed) for replica, samples in enumerate(sizes)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        (sum_of_losses(plain(inputs), targets) / tokens(targets)).backward()
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_averages_and_what_compressors_leave_over_are_the_gradients(wrap: Any):
    """Also of a replica that is empty later, which still sends what it has left over."""
    steps = [(3, 2), (0, 4), (5, 0)]
    expected = sums_of_gradients(steps)

    def run(backend: Backend) -> dict[str, Tensor]:
        def compressed(layer: nn.Module, data: Backend) -> nn.Module:
            return wrap(layer, data, compression=ErrorFeedback(TopK(0.1)))

        pipeline, mesh = replica_of(backend, compressed, 2)
        parts, total = slices_in(pipeline), {}
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.0)
        for seed, sizes in enumerate(steps):
            optimizer.zero_grad()
            step(pipeline, mesh, sizes, seed)
            for name, parameter in pipeline.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, 0) + parameter.grad.clone()
            optimizer.step()
        share = {"DDP": 2, "FSDP": 1}[wrap.__name__]  # replicas that have the same of an average
        sums = {}
        for name, parameter in pipeline.named_parameters():
            whole, part = torch.zeros(parts[parameter].shape, dtype=torch.float64), parts[parameter]
            whole.view(-1)[part.start : part.stop] = total[name].flatten() / share
            sums[name] = whole
        for key, left in pipeline.state_dict().items():
            if match := re.fullmatch(r"(\d+\.)compression@\d+/2\.residual\.(.*)", key):
                name = match.group(1) + match.group(2)
                sums[name] += left.view(sums[name].shape) / 2
        return sums

    together: dict[str, Tensor] = {}
    for sums in simulate(run, 4):
        for name, value in sums.items():
            together[name] = together.get(name, torch.zeros(())) + value
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(together[name], value, name)


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_a_scaler_scales_sums_of_losses(name: str):
    """A step with an infinity in one replica is skipped on all ranks, the empty ones, too."""
    expected = sums_of_gradients([(0, 4)])

    def run(backend: Backend) -> None:
        pipeline, mesh = replica_of(backend, WRAPS[name], 2)
        optimizer, scaler = sgd(pipeline.parameters()), GradScaler(backend, init_scale=1024.0)

        def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
            return scaler.scale(sum_of_losses(outputs, targets))

        inputs, targets = batch(1, 4, 0)
        for factor in (1.0, math.inf):
            given = (inputs * factor, targets, scaled) if mesh["data"].rank else (None, None, None)
            before = [p.detach().clone() for p in pipeline.parameters()]
            optimizer.zero_grad()
            pipeline.train_step(*given, weight=tokens(targets) if mesh["data"].rank else 0)
            scaler.unscale_(optimizer)
            if factor == 1.0:
                assert_parts(pipeline, expected)
            scaler.step(optimizer)
            scaler.update()
            after = list(pipeline.parameters())
            moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert moved == (factor == 1.0 and any(p.numel() for p in after))
        assert scaler.get_scale() == 512.0

    simulate(run, 4)


class Counts(nn.Module):
    """Counts its forward passes, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * self.weight


def test_buffers_are_those_of_the_first_replica_with_a_batch():
    """Once at the beginning of a step, if they are broadcast."""

    def run(backend: Backend) -> list[float]:
        passes = []
        for broadcasts in (True, False):

            def wrap(layer: nn.Module, data: Backend, on: bool = broadcasts) -> nn.Module:
                return DDP(layer, data, broadcast_buffers=on)

            pipeline, mesh = replica_of(backend, wrap, 2, layers=[Counts(), Counts()])
            for seed, sizes in enumerate([(0, 4), (2, 2), (0, 4)]):
                step(pipeline, mesh, sizes, seed)
            passes += [value.item() for value in pipeline.buffers()]
        return passes

    # 0 and 2; 0 + 2 and 0 + 2, the first one's; 2, the second one's, and 2 + 2.
    assert list(simulate(run, 4)) == [[2, 2], [2, 2], [4, 6], [4, 6]]


# An uneven number of batches ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DDP", "FSDP"])
def test_an_uneven_epoch_under_join_is_that_of_one_process(name: str):
    """Replica r has r + 1 batches."""
    steps = [(3, 2, 4), (0, 2, 3), (0, 0, 5)]
    expected, state = plainly(steps)

    def run(backend: Backend) -> int:
        pipeline, mesh = replica_of(backend, WRAPS[name], 3)
        optimizer, replica, taken = sgd(pipeline.parameters()), mesh["data"].rank, []

        def follow() -> None:
            taken.append(clip_grad_norm_(pipeline, 0.1))
            optimizer.step()
            optimizer.zero_grad()

        with pipeline.join(follow):
            for seed in range(replica + 1):
                loss = step(pipeline, mesh, steps[seed], seed)
                assert loss.item() == pytest.approx(expected[seed][0], rel=1e-12)
                follow()
        assert_parts(pipeline, state, of="values")
        return len(taken)

    assert list(simulate(run, 6)) == [3] * 6


def test_a_rank_that_is_through_alone_is_named_on_all_ranks_of_its_pipeline():
    def run(backend: Backend) -> BaseException | None:
        pipeline, mesh = replica_of(backend, DDP, 2)
        through = backend.rank == 1

        def train() -> None:
            with nullcontext() if not through else pipeline.join(lambda: None):
                if not through:
                    step(pipeline, mesh, (3, 2), 0)

        return outcome_of(train)

    errors = list(simulate(run, 4))
    for error in errors[:2]:
        assert isinstance(error, DesyncError)
        assert "rank 0 began train_step while rank 1 began join" in str(error)
    for error in errors[2:]:
        assert isinstance(error, ValueError)
        assert "rank 0 cannot begin it; see its error" in str(error)


# What is refused ---------------------------------------------------------------------------------


def refusals(spoil: Callable[[DeviceMesh, dict[str, Any]], object]) -> list[BaseException | None]:
    """Each rank's error in a step whose arguments are spoiled; then all can go on."""
    expected = sums_of_gradients([(3, 2)])

    def run(backend: Backend) -> BaseException | None:
        pipeline, mesh = replica_of(backend, DDP, 2)
        inputs, targets = batch(mesh["data"].rank, (3, 2)[mesh["data"].rank], 0)
        given = {"inputs": inputs, "targets": targets, "weight": tokens(targets)}
        spoil(mesh, given)
        error = outcome_of(lambda: pipeline.train_step(loss=sum_of_losses, **given))
        step(pipeline, mesh, (3, 2), 0)
        assert_parts(pipeline, expected)
        return error

    return list(simulate(run, 4))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (math.nan, "weight must be a number of at least 0, not nan"),
        (-1, "weight must be a number of at least 0, not -1"),
        (math.inf, "weight must be a number of at least 0, not inf"),
        (torch.ones((), requires_grad=True), "weight has a gradient"),
    ],
)
def test_a_weight_that_is_none_is_refused_on_every_rank_of_every_replica(weight: Any, words: str):
    def spoil(mesh: DeviceMesh, given: dict[str, Any]) -> None:
        if mesh.backend.rank == 3:
            given["weight"] = weight

    errors = refusals(spoil)
    assert all(isinstance(error, ValueError) for error in errors)
    assert all(words in str(error) for error in errors[2:])
    assert all("rank 1 cannot begin it; see its error" in str(error) for error in errors[:2])


def test_all_weights_of_0_are_refused_on_every_rank():
    for error in refusals(lambda mesh, given: given.update(weight=0)):
        assert isinstance(error, ValueError)
        assert "all weights are 0" in str(error)

    def alone(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, model(), 2)
        return outcome_of(lambda: pipeline.train_step(None, None, sum_of_losses, weight=0))

    assert all("all weights are 0" in str(error) for error in simulate(alone, 2))


def test_with_replicas_each_batch_has_a_weight():
    errors = refusals(lambda mesh, given: given.update(weight=None))
    assert all(isinstance(error, ValueError) for error in errors)
    assert all("with replicas=: weight must be a number" in str(error) for error in errors)


def test_two_weights_of_one_batch_are_refused_with_both_places():
    def spoil(mesh: DeviceMesh, given: dict[str, Any]) -> None:
        if mesh.backend.rank == 0:
            given["weight"] = 99

    errors = refusals(spoil)
    for error in errors[:2]:
        assert isinstance(error, DesyncError)
        assert re.search(r"weights of a batch differ, by rank: \{0: 99.0, 1: \d.0\}", str(error))
    assert all(isinstance(error, ValueError) for error in errors[2:])


def test_a_replica_of_which_a_rank_only_has_no_batch_is_refused():
    def spoil(mesh: DeviceMesh, given: dict[str, Any]) -> None:
        if mesh.backend.rank == 0:
            given["inputs"] = None

    errors = refusals(spoil)
    assert all(isinstance(error, MisuseError) for error in errors[:2])
    assert all("see its error" in str(error) for error in errors[2:])


def test_fewer_samples_than_micro_batches_are_as_many_micro_batches_but_with_fsdp():
    expected = sums_of_gradients([(1, 3)])

    def run(backend: Backend, wrap: Wrap) -> BaseException | None:
        pipeline, mesh = replica_of(backend, wrap, 2)
        error = outcome_of(lambda: step(pipeline, mesh, (1, 3), 0))
        if error is None:
            assert_parts(pipeline, expected)
        return error

    assert list(simulate(lambda backend: run(backend, DDP), 4)) == [None] * 4
    errors = list(simulate(lambda backend: run(backend, FSDP), 4))
    assert all(isinstance(error, SizeMismatchError) for error in errors[:2])
    assert all("see its error" in str(error) for error in errors[2:])


def test_a_weight_without_replicas_of_layers_that_average_is_refused():
    def run(backend: Backend) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        pipeline = piped(mesh["stage"], [DDP(nn.Linear(SIZE, SIZE), mesh["data"]), nn.Tanh()], 2)
        inputs, targets = torch.ones(4, SIZE), torch.ones(4, SIZE)
        return outcome_of(lambda: pipeline.train_step(inputs, targets, F.mse_loss, weight=4))

    assert all("Pipeline(replicas=)" in str(error) for error in simulate(run, 4))


def test_layers_that_are_not_averaged_with_the_replicas_are_refused():
    def local(layer: nn.Module, data: Backend) -> nn.Module:
        return LocalSGD(layer, data, every=2)

    def run(backend: Backend, wrap: Wrap) -> BaseException | None:
        def build_and_train() -> None:
            pipeline, mesh = replica_of(backend, wrap, 2)
            step(pipeline, mesh, (3, 2), 0)

        return outcome_of(build_and_train)

    for error in simulate(lambda backend: run(backend, local), 4):
        assert isinstance(error, MisuseError)
        assert "is in LocalSGD, and not in DDP or FSDP over replicas=" in str(error)
    for error in simulate(lambda backend: run(backend, lambda layer, _: layer), 4):
        assert isinstance(error, (MisuseError, ValueError))
        assert "is trained outside of what averages" in str(error) or "see its error" in str(error)

    def alone(layer: nn.Module, data: Backend) -> nn.Module:
        return DDP(layer, data.subgroup([data.rank]))

    for error in simulate(lambda backend: run(backend, alone), 4):
        assert "is in DDP, and not in DDP or FSDP over replicas=" in str(error)


def test_replicas_on_some_ranks_of_a_pipeline_only_are_refused():
    def run(backend: Backend) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        replicas = mesh["data"] if mesh["stage"].rank == 0 else None
        return outcome_of(lambda: piped(mesh["stage"], model(), 2, replicas=replicas))

    assert all("replicas (0, 2)" in str(error) for error in list(simulate(run, 4))[:2])


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_an_empty_replica_of_a_sync_batch_norm_is_refused_on_every_rank(wrap: Any):
    def run(backend: Backend) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        norm = SyncBatchNorm(SIZE, mesh["data"]).double()
        layers = [*model()[:4], norm, *model()[4:]]
        wrapped = [wrap(x, mesh["data"]) if list(x.parameters()) else x for x in layers]
        pipeline = piped(mesh["stage"], wrapped, 2, replicas=mesh["data"])
        return outcome_of(lambda: step(pipeline, mesh, (0, 3), 0))

    errors = list(simulate(run, 4))
    assert all("weight 0 with a SyncBatchNorm" in str(error) for error in errors[:2])
    assert all("rank 0 cannot begin it; see its error" in str(error) for error in errors[2:])


def test_join_without_replicas_is_refused():
    def run(backend: Backend) -> BaseException | None:
        pipeline = piped(backend, model(), 2)
        return outcome_of(lambda: pipeline.join(lambda: None).__enter__())

    assert all("join() without replicas=" in str(error) for error in simulate(run, 2))


@pytest.mark.parametrize("cut", [("0", "2", "4", "6"), ("0", "2")])
def test_ranks_with_parts_of_the_same_layers_have_the_same_weight(cut: Sequence[str]):
    """Data x stage x tensor: each pipeline sees its own weights only. In all stages, or in one."""

    plain, (inputs, targets) = model()[:7], batch(0, 4, 0)
    loss = sum_of_losses(plain(inputs), targets) / tokens(targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)

    def run(backend: Backend, spoils: bool) -> BaseException | None:
        mesh = DeviceMesh(backend, (2, 2, 2), ("data", "stage", "tensor"))
        plan = dict(zip(cut, ["column", "row"] * 2, strict=False))
        layers = parallelize(model()[:7], mesh["tensor"], plan)
        wrapped = [DDP(x, mesh["data"]) if list(x.parameters()) else x for x in layers.children()]
        pipeline = piped(mesh["stage"], wrapped, 2, replicas=mesh["data"])
        odd = spoils and mesh["tensor"].rank == 1 and mesh["data"].rank == 0
        weight = tokens(targets) + odd

        def train() -> None:
            found = pipeline.train_step(inputs, targets, sum_of_losses, weight=weight)
            assert_near(found, loss)
            assert_near(clip_grad_norm_(pipeline, 1.0), norm)

        return outcome_of(train)

    assert list(simulate(lambda backend: run(backend, False), 8)) == [None] * 8
    errors = list(simulate(lambda backend: run(backend, True), 8))
    assert all(isinstance(error, DesyncError) for error in errors)
    assert all("STEP next, of weight" in str(error) for error in errors)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_an_error_in_one_replica_is_told_to_all_also_to_those_without_a_batch(wrap: Any):
    def spoiled(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError

    def run(backend: Backend) -> BaseException | None:
        pipeline, mesh = replica_of(backend, wrap, 3)
        inputs, targets = batch(mesh["data"].rank, 3, 0)
        given = (inputs, targets) if mesh["data"].rank < 2 else (None, None)
        weight = tokens(targets) if mesh["data"].rank < 2 else 0
        loss = spoiled if mesh["data"].rank == 0 else sum_of_losses
        return outcome_of(lambda: pipeline.train_step(*given, loss, weight=weight))

    errors = list(simulate(run, 6))
    assert isinstance(errors[1], ZeroDivisionError)
    assert all(isinstance(error, PeerLostError) for n, error in enumerate(errors) if n != 1)
    assert all("failed: ZeroDivisionError" in str(error) for error in errors[2:])

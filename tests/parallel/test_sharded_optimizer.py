"""ShardedOptimizer over DDP: the steps of the plain optimizer, each parameter's on one rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from clusters import Cluster, Cooperative, SharedMemory, Tcp
from ddp_models import Branches, loss_of, mlp, noise, seeded, vectors
from ddp_runs import Watched, assert_close, assert_same_bits, outcome_of, rows_of
from sharded_runs import FACTORIES, Make, optimizers, plainly, train, whole_values
from torch import Tensor, nn

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
    Pipeline,
    PipelineParallelConfig,
    ShardedOptimizer,
    TopK,
    UnsupportedOperationError,
    clip_grad_norm_,
    simulate,
)
from phalanx.optim import sharded

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
Body = Callable[[DDP, Backend], Any]


def on_ranks(
    size: int,
    body: Body,
    *,
    build: Callable[[], nn.Module] = mlp,
    where: Cluster | None = None,
    **options: Any,
) -> list[Any]:
    """Run `body(DDP(model), backend)` on every rank, in buckets of a few parameters."""
    models = [build() for _ in range(size)]
    options = {"bucket_size": 100, **options}
    run = (where or Cooperative()).run
    return run(lambda backend: body(DDP(models[backend.rank], backend, **options), backend), size)


def trained(factory: Make, *, sharded: bool, **how: Any) -> Body:
    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        train(model, optimizers(model, factory, sharded=sharded), backend, **how)
        return whole_values(model)

    return body


# The numbers ----------------------------------------------------------------------------------


@pytest.mark.checkered
@every_factory
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_steps_give_the_bits_of_plain_ddp(factory: Make, ranks: int) -> None:
    exact = {"reproducible": True}
    found = on_ranks(ranks, trained(factory, sharded=True), **exact)
    expected = on_ranks(ranks, trained(factory, sharded=False), **exact)
    assert_same_bits([*found, expected[0]])
    assert_close(found[0], plainly(factory), rtol=1e-3, atol=1e-4)


@every_factory
def test_two_ranks_give_them_in_any_order_of_sums(factory: Make) -> None:
    found = on_ranks(2, trained(factory, sharded=True))
    assert_same_bits([*found, on_ranks(2, trained(factory, sharded=False))[0]])


@pytest.mark.parametrize("where", [Tcp(), SharedMemory()], ids=str)
def test_ranks_that_run_freely_give_them(where: Cluster) -> None:
    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        train(model, optimizers(model, FACTORIES["AdamW"], sharded=True), backend, steps=5)
        large = ShardedOptimizer(SGD, large_model := DDP(large_layer(), backend), lr=0.1)
        large_model(torch.ones(2, 600)).sum().backward()
        large.step()
        return whole_values(model) | {f"large.{n}": p for n, p in whole_values(large_model).items()}

    def large_layer() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 7)))

    found = on_ranks(2, body, where=where)
    plain = large_layer()
    plain(torch.ones(2, 600)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = on_ranks(2, trained(FACTORIES["AdamW"], sharded=False, steps=5))[0]
    expected |= {f"large.{n}": p for n, p in whole_values(plain).items()}
    assert_same_bits(found)
    assert_close(found[0], expected, rtol=1e-5, atol=1e-6)


def test_more_ranks_than_parameters_and_one_rank_alone() -> None:
    for ranks in (1, 6):
        found = on_ranks(
            ranks, trained(FACTORIES["AdamW"], sharded=True, steps=4), reproducible=True
        )
        assert_same_bits(found)
        assert_close(found[0], plainly(FACTORIES["AdamW"], steps=4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_counts_each_gradient_once(ranks: int, norm_type: float) -> None:
    plain = mlp()
    loss_of(plain(vectors(60)[0]), vectors(60)[1]).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    some = [name for name, _ in plain.named_parameters()][:3]  # the rest has a plain optimizer

    def body(model: DDP, backend: Backend) -> Tensor:
        named = dict(model.named_parameters())
        ShardedOptimizer(AdamW, model, groups=[named[name] for name in some], lr=0.1)
        inputs, targets = (rows_of(t, backend) for t in vectors(60))
        loss_of(model(inputs), targets).backward()
        norm = clip_grad_norm_(model, 0.1, norm_type=norm_type)
        for name, parameter in plain.named_parameters():
            mine = named[name].grad
            assert (mine is None) or torch.allclose(mine, parameter.grad, rtol=1e-4)
        return norm

    found = on_ranks(ranks, body)
    assert len({norm.item() for norm in found}) == 1
    torch.testing.assert_close(found[0].float(), expected)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_each_stage_of_a_pipeline_has_its_own_and_the_norm_is_that_of_all(wrap: Any) -> None:
    def layers() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)))

    def run(backend: Backend) -> tuple[list[float], dict[str, Tensor]]:
        mesh = DeviceMesh(backend, (2, 2), ("data", "stage"))
        model = layers()
        stages = nn.Sequential(wrap(model[:2], mesh["data"]), wrap(model[2:], mesh["data"]))
        pipeline = Pipeline(stages, mesh["stage"], PipelineParallelConfig(2, 2))
        (mine,) = (module for module in pipeline.modules() if isinstance(module, wrap))
        optimizer, norms = ShardedOptimizer(AdamW, mine, lr=0.02), []
        for number in range(3):
            inputs, targets = (rows_of(t, mesh["data"]) for t in vectors(8, seed=number))
            optimizer.zero_grad()
            pipeline.train_step(inputs, targets, loss_of)
            norms.append(clip_grad_norm_(pipeline, 0.1).item())
            optimizer.step()
        return norms, whole_values(mine)

    plain = layers()
    optimizer, norms = AdamW(plain.parameters(), lr=0.02), []
    for number in range(3):
        optimizer.zero_grad()
        loss_of(plain(vectors(8, seed=number)[0]), vectors(8, seed=number)[1]).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item())
        optimizer.step()
    stages = [whole_values(plain[:2]), whole_values(plain[2:])]
    for rank, (found, values) in enumerate(simulate(run, 4)):
        assert found == pytest.approx(norms, rel=1e-4)
        assert_close(values, stages[rank % 2], rtol=1e-4, atol=1e-5)


# What is where --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_gradients_and_state_are_with_their_owners_alone(ranks: int) -> None:
    def body(model: DDP, backend: Backend) -> list[tuple[str, bool]]:
        (optimizer,) = optimizers(model, FACTORIES["AdamW"], sharded=True)
        train(model, [optimizer], backend, steps=2)
        kept = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim)
        sizes = [2 * p.nbytes for p in model.parameters()]
        assert kept <= sum(sizes) / ranks + max(sizes)
        for parameter in model.parameters():
            assert (parameter.grad is not None) == (parameter in optimizer.state)
        return [(name, p in optimizer.state) for name, p in model.named_parameters()]

    owned = on_ranks(ranks, body)
    for name in dict(mlp().named_parameters()):
        assert sum((name, True) in of_rank for of_rank in owned) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "widths", [(128, 128, 128, 128, 128, 128, 128), (900, 100, 10)], ids=["alike", "one large"]
)
def test_a_step_sends_no_more_than_plain_ddp(ranks: int, widths: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(widths)))

    def body(model: DDP, backend: Backend) -> int:
        optimizer = ShardedOptimizer(SGD, model, lr=0.1)
        watched = Watched(backend)
        for _ in range(2):  # in the first one gradients show the order in which they arrive
            watched.clear()
            model(torch.ones(1, widths[0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return watched.bytes_sent

    count = sum(p.nbytes for p in build().parameters())
    sent = Tcp().run(lambda backend: body(DDP(build(), backend), backend), ranks)
    assert sum(sent) / ranks == pytest.approx(2 * (ranks - 1) / ranks * count, rel=0.01)
    assert max(sent) <= 2 * count


def test_parameters_are_dealt_by_size() -> None:
    def body(model: DDP, backend: Backend) -> list[int]:
        optimizer = ShardedOptimizer(SGD, model, lr=0.1)
        return sorted(p.numel() for p in optimizer.owned)

    def build() -> nn.Module:
        sizes = [1, 7, 3, 3, 2]
        return nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])

    assert on_ranks(2, body, build=build) == [[1, 7], [2, 3, 3]]


# As any optimizer -----------------------------------------------------------------------------


def test_schedules_groups_closures_and_hooks_are_as_ever() -> None:
    def run(model: nn.Module, make: Callable[[list[Any]], Any], rows: Callable[..., Any]) -> Any:
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        rest = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        optimizer = make([{"params": weights, "weight_decay": 0.3}, {"params": rest, "lr": 0.05}])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=6)
        called = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        for number in range(6):
            inputs, targets = (rows(each) for each in vectors(60, seed=number))

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
            schedule.step()
        assert called == ["before", "after"] * 6
        return whole_values(model)

    plain = mlp()
    expected = run(plain, lambda groups: AdamW(groups, lr=0.1), lambda rows: rows)
    found = on_ranks(
        3,
        lambda model, backend: run(
            model,
            lambda groups: ShardedOptimizer(AdamW, model, groups=groups, lr=0.1),
            lambda rows: rows_of(rows, backend),
        ),
    )
    assert_same_bits(found)
    assert_close(found[0], expected, rtol=1e-3, atol=1e-4)


def test_a_group_that_is_added_later_is_stepped_on() -> None:
    """Each parameter of it has an owner, too."""

    def run(model: nn.Module, make: Any, backend: Backend | None) -> dict[str, Tensor]:
        parameters = list(model.parameters())
        optimizer = make(parameters[:2])
        train(model, [optimizer], backend, steps=2)
        optimizer.add_param_group({"params": parameters[2:5], "lr": 0.03})
        train(model, [optimizer], backend, steps=3, first=2)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
        return whole_values(model)

    expected = run(mlp(), lambda given: AdamW(given, lr=0.01), None)
    found = on_ranks(
        3,
        lambda model, backend: run(
            model, lambda given: ShardedOptimizer(AdamW, model, groups=given, lr=0.01), backend
        ),
    )
    assert_same_bits(found)
    assert_close(found[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_forms_of_an_optimizer(form: str) -> None:
    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        train(model, [ShardedOptimizer(AdamW, model, lr=0.01, **{form: True})], backend, steps=3)
        return whole_values(model)

    found = on_ranks(3, body)
    assert_same_bits(found)
    assert_close(found[0], plainly(FACTORIES["AdamW"], steps=3), rtol=1e-3, atol=1e-4)


def test_its_state_dict_is_this_rank_s_part_and_a_whole_one_is_taken() -> None:
    plain = mlp()
    (whole,) = optimizers(plain, FACTORIES["AdamW"], sharded=False)
    train(plain, [whole], steps=2)
    after_two = (copy.deepcopy(plain.state_dict()), copy.deepcopy(whole.state_dict()))
    train(plain, [whole], steps=2, first=2)

    def body(model: DDP, backend: Backend) -> tuple[Any, Any]:
        model.load_state_dict(after_two[0])
        (optimizer,) = optimizers(model, FACTORIES["AdamW"], sharded=True)
        optimizer.load_state_dict(after_two[1])
        train(model, [optimizer], backend, steps=1, first=2)
        mine = copy.deepcopy(optimizer.state_dict())
        (again,) = optimizers(model, FACTORIES["AdamW"], sharded=True)
        again.load_state_dict(mine)
        train(model, [again], backend, steps=1, first=3)
        return whole_values(model), mine

    found = on_ranks(3, body)
    assert_close(found[0][0], whole_values(plain), rtol=1e-3, atol=1e-4)
    states = [mine for _, mine in found]
    assert sorted(key for state in states for key in state["part"]["state"]) == list(range(6))
    with pytest.raises(KeyError):  # a part is not taken for the whole
        whole.load_state_dict(states[0])

    def of_another_rank(model: DDP, backend: Backend) -> BaseException | None:
        (optimizer,) = optimizers(model, FACTORIES["AdamW"], sharded=True)
        return outcome_of(lambda: optimizer.load_state_dict(states[1 - backend.rank]))

    for error in on_ranks(2, of_another_rank):
        assert isinstance(error, MisuseError)
        assert "save_checkpoint" in str(error)


# With what DDP can do -------------------------------------------------------------------------


def accumulated(kind: str) -> Callable[[nn.Module, Any, Callable[..., Any]], None]:
    def run(model: Any, optimizer: Any, rows: Callable[..., Any]) -> None:
        def backward(seed: int) -> None:
            inputs, targets = (rows(each) for each in vectors(60, seed=seed))
            loss_of(model(inputs), targets).backward()

        for number in range(0, 9, 3):
            if kind == "under no_sync" and isinstance(model, DDP):
                with model.no_sync():
                    backward(number)
                    backward(number + 1)
            else:
                backward(number)
                backward(number + 1)
            if kind == "both" and isinstance(model, DDP):
                with model.no_sync():
                    backward(number + 2)
                model.sync_gradients()
            else:
                backward(number + 2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=kind != "zeros")

    return run


@pytest.mark.parametrize("kind", ["under no_sync", "pass by pass", "zeros", "both"])
def test_passes_add_up(kind: str) -> None:
    """Also to a mean of an earlier pass, which only its owner has."""
    plain = mlp()
    accumulated(kind)(plain, SGD(plain.parameters(), lr=0.05), lambda rows: rows)

    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        optimizer = ShardedOptimizer(SGD, model, lr=0.05)
        accumulated(kind)(model, optimizer, lambda rows: rows_of(rows, backend))
        return whole_values(model)

    found = on_ranks(3, body)
    assert_same_bits(found)
    assert_close(found[0], whole_values(plain), rtol=1e-4, atol=1e-5)


def test_parameters_that_no_rank_uses_stay_and_one_rank_is_enough() -> None:
    def build() -> nn.Module:
        return seeded(Branches)

    def step(model: nn.Module, optimizer: Any, names: list[list[str]]) -> None:
        losses = [model(noise(4, 6, seed=at), *some).pow(2).sum() for at, some in enumerate(names)]
        (sum(losses) / len(names)).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = build()
    optimizer = SGD(plain.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        step(plain, optimizer, [["left"], ["left"]])

    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        optimizer = ShardedOptimizer(SGD, model, lr=0.1, weight_decay=0.5)
        for _ in range(2):
            model(noise(4, 6, seed=backend.rank), "left").pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_values(model)

    found = on_ranks(2, body, build=build, find_unused_parameters=True)
    assert_same_bits(found)
    assert_close(found[0], whole_values(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(value: float) -> None:
    """Also if only the sum is too large, which the owner alone has."""

    def body(model: DDP, backend: Backend) -> tuple[int, dict[str, Tensor]]:
        optimizer = ShardedOptimizer(AdamW, model, lr=0.1)
        before = whole_values(model)
        (model(torch.ones(2, 6)).sum() * 0 + model.module[4].bias.sum() * value).backward()
        optimizer.step()
        assert_same_bits([before, whole_values(model)])
        optimizer.zero_grad()
        train(model, [optimizer], backend, steps=1)
        return model.skipped_steps, whole_values(model)

    found = on_ranks(3, body, skip_nonfinite=True)
    assert [skipped for skipped, _ in found] == [1, 1, 1]
    assert_same_bits([after for _, after in found])


def test_replicas_are_alike_when_they_are_compared() -> None:
    found = on_ranks(3, trained(FACTORIES["Adafactor"], sharded=True), check_replicas_every=2)
    assert_same_bits(found)


@pytest.mark.parametrize("zeroes", ["before a batch", "after a step"])
@pytest.mark.parametrize("passes", [1, 2])
def test_ranks_without_a_batch_answer_and_step(passes: int, zeroes: str) -> None:
    """After each pass, or after two that add up."""

    def loss(model: nn.Module, rank: int, number: int) -> Tensor:
        inputs, targets = vectors(4 + rank, seed=10 * number + rank)
        return loss_of(model(inputs), targets) * (4 + rank)

    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        optimizer, done = ShardedOptimizer(SGD, model, lr=0.05, momentum=0.9), [0]

        def step() -> None:
            done[0] += 1
            if done[0] % passes == 0:
                optimizer.step()
                if zeroes == "after a step":
                    optimizer.zero_grad()

        with model.join(step):
            for number in range(2 * (1 + backend.rank)):
                if number % passes == 0 and zeroes == "before a batch":
                    optimizer.zero_grad()
                (loss(model, backend.rank, number) / 5).backward()
                step()
        return whole_values(model)

    plain = mlp()
    optimizer = SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for number in range(6):
        ranks = [rank for rank in range(3) if number < 2 * (1 + rank)]
        (sum(loss(plain, rank, number) for rank in ranks) / 5 / len(ranks)).backward()
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = on_ranks(3, body)
    assert_same_bits(found)
    assert_close(found[0], whole_values(plain), rtol=1e-4, atol=1e-5)


def test_join_without_a_step_is_refused() -> None:
    def body(model: DDP, backend: Backend) -> BaseException | None:
        ShardedOptimizer(SGD, model, lr=0.1)
        return outcome_of(lambda: model.join().__enter__())

    for error in on_ranks(2, body):
        assert isinstance(error, MisuseError)
        assert "step" in str(error)


def test_compressed_gradients_are_the_same_ones_as_with_the_plain_optimizer() -> None:
    how = {"compression": ErrorFeedback(TopK(0.5))}
    found = on_ranks(3, trained(FACTORIES["AdamW"], sharded=True, steps=6), **how)
    expected = on_ranks(3, trained(FACTORIES["AdamW"], sharded=False, steps=6), **how)
    assert_same_bits(found)
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)


def test_a_scaler_skips_a_step_on_all_ranks_and_torch_s_is_refused() -> None:
    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        (optimizer,) = optimizers(model, FACTORIES["AdamW"], sharded=True)
        torchs = torch.amp.GradScaler("cpu", init_scale=8.0)
        torchs.scale(model(torch.ones(2, 6)).sum()).backward()
        with pytest.raises(MisuseError, match=r"phalanx\.GradScaler"):
            torchs.step(optimizer)
        scaler = GradScaler(backend, init_scale=8.0, growth_interval=2)
        for number in range(3):
            optimizer.zero_grad()
            inputs, targets = (rows_of(each, backend) for each in vectors(60, seed=number))
            scaler.scale(loss_of(model(inputs), targets)).backward()
            if number == 1 and (bias := model.module[4].bias).grad is not None:
                bias.grad[0] = torch.inf
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, 0.5)
            scaler.step(optimizer)
            scaler.update()
        return whole_values(model) | {"scale": torch.tensor(scaler.get_scale())}

    plain = mlp()
    (optimizer,) = optimizers(plain, FACTORIES["AdamW"], sharded=False)
    for number in (0, 2):
        inputs, targets = vectors(60, seed=number)
        optimizer.zero_grad()
        loss_of(plain(inputs), targets).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    found = on_ranks(3, body)
    assert_same_bits(found)
    expected = whole_values(plain) | {"scale": torch.tensor(4.0)}
    assert_close(found[0], expected, rtol=1e-3, atol=1e-4)


def test_parameters_are_frozen_and_unfrozen() -> None:
    def run(model: nn.Module, optimizer: Any, backend: Backend | None) -> dict[str, Tensor]:
        for frozen in (True, False):
            train(model, [optimizer], backend, steps=1)
            for parameter in list(model.parameters())[:3]:
                parameter.requires_grad_(not frozen)  # after its gradient came
            optimizer.step()
            optimizer.zero_grad()
            train(model, [optimizer], backend, steps=2)
        return whole_values(model)

    plain = mlp()
    expected = run(plain, SGD(plain.parameters(), lr=0.05, momentum=0.9), None)
    found = on_ranks(
        3,
        lambda model, backend: run(
            model, ShardedOptimizer(SGD, model, lr=0.05, momentum=0.9), backend
        ),
    )
    assert_same_bits(found)
    assert_close(found[0], expected, rtol=1e-3, atol=1e-4)


def test_a_compiled_model_is_taken() -> None:
    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        compiled = torch.compile(model, backend="eager")
        optimizer = ShardedOptimizer(AdamW, compiled, lr=0.01)
        train(compiled, [optimizer], backend, steps=2)
        return whole_values(model)

    found = on_ranks(2, body)
    assert_same_bits(found)
    assert_close(found[0], plainly(FACTORIES["AdamW"], steps=2), rtol=1e-3, atol=1e-4)


def test_a_copy_of_the_model_has_another_optimizer() -> None:
    def body(model: DDP, backend: Backend) -> dict[str, Tensor]:
        (optimizer,) = optimizers(model, FACTORIES["AdamW"], sharded=True)
        train(model, [optimizer], backend, steps=1)
        for fails in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(UnsupportedOperationError, match="copied or pickled"):
                fails(optimizer)
        twin = copy.deepcopy(model)
        train(twin, [SGD(twin.parameters(), lr=0.1)], backend, steps=1)
        assert all(parameter.grad is not None for parameter in twin.parameters())
        train(model, [optimizer], backend, steps=1, first=1)
        return whole_values(model)

    found = on_ranks(2, body)
    assert_same_bits(found)
    assert_close(found[0], plainly(FACTORIES["AdamW"], steps=2), rtol=1e-3, atol=1e-4)


# Refused --------------------------------------------------------------------------------------


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))


class Lamb(torch.optim.Adam):
    def __init__(self, params: Any, lr: float, max_grad_norm: float | None) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["max_grad_norm"] = max_grad_norm


REFUSED: dict[str, tuple[Callable[[DDP, Backend], object], type[Exception], str]] = {
    "a plain model": (lambda m, b: ShardedOptimizer(SGD, mlp()), TypeError, "a DDP or an FSDP"),
    "LocalSGD": (
        lambda m, b: ShardedOptimizer(SGD, LocalSGD(mlp(), b, every=2)),
        TypeError,
        "LocalSGD",
    ),
    "other parameters": (
        lambda m, b: ShardedOptimizer(SGD, m, groups=mlp().parameters(), lr=0.1),
        MisuseError,
        "not one of the model's",
    ),
    "no parameters": (
        lambda m, b: ShardedOptimizer(SGD, m, groups=[], lr=0.1),
        ValueError,
        "empty parameter list",
    ),
    "L-BFGS": (
        lambda m, b: ShardedOptimizer(torch.optim.LBFGS, m),
        UnsupportedOperationError,
        "LBFGS needs all gradients",
    ),
    "a norm inside": (
        lambda m, b: ShardedOptimizer(Lamb, m, lr=0.1, max_grad_norm=1.0),
        UnsupportedOperationError,
        "max_grad_norm",
    ),
    "vectors for Muon": (
        lambda m, b: ShardedOptimizer(torch.optim.Muon, m),
        ValueError,
        "only supports 2D",
    ),
    "another learning rate on one rank": (
        lambda m, b: ShardedOptimizer(SGD, m, lr=0.1 + b.rank),
        DesyncError,
        "lr = ",
    ),
    "sparse gradients": (
        lambda m, b: ShardedOptimizer(SGD, DDP(table(), b), lr=0.1),
        UnsupportedOperationError,
        "no sparse gradients, as 0.weight",
    ),
}


@pytest.mark.parametrize(("make", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_on_every_rank(make: Any, kind: type[Exception], text: str) -> None:
    errors = on_ranks(3, lambda model, backend: outcome_of(lambda: make(model, backend)))
    assert [type(error) for error in errors] == [kind] * 3
    assert all(text in str(error) for error in errors)


def test_a_group_that_is_refused_is_not_added() -> None:
    def body(model: DDP, backend: Backend) -> None:
        optimizer = ShardedOptimizer(SGD, model, groups=[model.module[0].weight], lr=0.1)
        with pytest.raises(MisuseError, match="not one of the model's"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1

    on_ranks(2, body)


@pytest.mark.parametrize("second", [SGD, ShardedOptimizer])
def test_a_parameter_in_two_optimizers_is_refused_at_the_step_of_the_wrong_one(
    second: Any,
) -> None:
    def body(model: DDP, backend: Backend) -> None:
        if second is SGD:
            other, own = SGD(model.parameters(), lr=0.1), ShardedOptimizer(SGD, model, lr=0.1)
        else:
            other, own = (ShardedOptimizer(SGD, model, lr=0.1) for _ in range(2))
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(MisuseError, match=r"0\.weight, which belongs to another optimizer"):
            other.step()
        own.step()

    on_ranks(2, body)


def test_a_step_on_gradients_that_were_not_averaged_is_refused() -> None:
    def body(model: DDP, backend: Backend) -> BaseException | None:
        optimizer = ShardedOptimizer(SGD, model, lr=0.1)
        with model.no_sync():
            model(torch.ones(2, 6)).sum().backward()
        return outcome_of(optimizer.step)

    for error in on_ranks(2, body):
        assert isinstance(error, MisuseError)
        assert "sync_gradients()" in str(error)


def test_optimizers_that_are_refused_by_name_are_torch_s() -> None:
    assert all(hasattr(torch.optim, name) for name in sharded.NEEDS_ALL)


def test_reproducible_averages_add_up_in_rank_order() -> None:
    with pytest.raises(ValueError, match="reproducible"):
        simulate(lambda b: DDP(mlp(), b, reproducible=True, compression=TopK(0.5)), 2)

    def body(model: DDP, backend: Backend) -> Tensor:
        model.module.weight.grad = None
        (model(torch.ones(1, 1)) * [1e8, 1.0, -1e8, 1.0][backend.rank]).sum().backward()
        return model.module.weight.grad.clone()

    found = on_ranks(4, body, build=lambda: nn.Linear(1, 8, bias=False), reproducible=True)
    in_rank_order = (((torch.tensor(1e8) + 1.0) - 1e8) + 1.0) / 4
    assert all(torch.equal(each, in_rank_order.expand(8, 1)) for each in found)

"""`step`: gradients and loss of one process that has the joined batch, however it is split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ddp_models import Branches, TiedTransformer, noise, seeded, sentences
from ddp_runs import Gradients, Watched, gradients
from forms import sizes
from fsdp_runs import (
    COMMON,
    MESSAGES,
    gradient_pieces,
    joined,
)
from joined_runs import (
    BY_MESSAGES,
    REPLICATED,
    SHARDED,
    SPLITS,
    UNEVEN,
    WITH_DDP,
    Split,
    alone,
    assert_equal_to_rounding,
    batch,
    both,
    build,
    few,
    gradients_alone,
    gradients_of_steps,
    loss_on,
    sum_of_losses,
    take_step,
)
from tensor_models import VOCABULARY, plan_for, transformer
from tensor_models import batch as text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from wrappings import UNUSED, Wrapping, every_wrapping

import phalanx
from phalanx import DDP, FSDP, Backend, DeviceMesh, ShardingStrategy, simulate
from phalanx.parallel import convert_sync_batchnorm
from phalanx.tensor import full_state_dict, parallel_cross_entropy

# The rule -----------------------------------------------------------------------------------------


@every_wrapping
def test_gradients_and_loss_are_those_of_the_joined_batch(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped, found = wrap(model, backend), []
        for number, split in enumerate(SPLITS):
            wrapped.zero_grad()
            step = take_step(wrapped, backend.rank, split, shift=10 * number)
            found.append((gradient_pieces(wrapped), step.loss, step.weight))
        return found

    steps = zip(*wrap.on_ranks(3, build, body), strict=True)
    for number, (split, ranks) in enumerate(zip(SPLITS, steps, strict=True)):
        plain = build()
        loss = alone(plain, split, shift=10 * number).item()
        assert_equal_to_rounding(joined([pieces for pieces, _, _ in ranks]), gradients(plain))
        assert all(abs(found - loss) <= 1e-12 * loss for _, found, _ in ranks)
        assert len({found for _, found, _ in ranks}) == 1
        assert {weight for _, _, weight in ranks} == {sum(map(sum, split))}


@few
def test_the_weight_is_the_number_of_labels_that_count(wrap: Wrapping):
    """Sums of cross entropy without ignored labels; a parameter has two uses."""

    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        tokens, labels = sentences(rows, seed=10 * rank + number)
        kept = labels.flatten().clone()
        kept[noise(kept.numel(), seed=rank + number) > 0.5 * rank] = -100
        return F.cross_entropy(model(tokens), kept, ignore_index=-100, reduction="sum"), kept

    split = [[2, 1], [3], [1, 2]]

    def count(rank: int) -> list[int]:
        plain = make()
        return [int((loss(plain, rank, n, r)[1] >= 0).sum()) for n, r in enumerate(split[rank])]

    def make() -> nn.Module:
        return seeded(TiedTransformer).double()

    counts = [count(rank) for rank in range(3)]

    def take(model: Any, rank: int, split: Split) -> None:
        with model.step(sum(counts[rank]), micro_batches=len(split[rank])) as step:
            for number, rows in enumerate(split[rank]):
                step.backward(loss(model, rank, number, rows)[0])

    plain = make()
    for rank in range(3):
        for number, rows in enumerate(split[rank]):
            (loss(plain, rank, number, rows)[0] / sum(map(sum, counts))).backward()
    (found,) = gradients_of_steps(wrap, split, make=make, take=take)
    assert_equal_to_rounding(found, gradients(plain))


def test_the_loss_is_that_of_the_backward_passes_whatever_becomes_of_its_tensors():
    def run(backend: Backend) -> float:
        ddp = DDP(build(), backend)
        with ddp.step(2) as step:
            loss = loss_on(ddp, backend.rank, 0, 2)
            step.backward(loss)
            loss.detach().zero_()
        return step.loss

    right = alone(build(), [[2], [2]]).item()
    assert list(simulate(run, 2)) == [pytest.approx(right, rel=1e-12)] * 2


def test_it_costs_two_small_messages():
    def run(backend: Backend) -> tuple[list[str], int]:
        ddp = DDP(build(), backend)
        loss_on(ddp, 0, 0, 2).backward()
        watched = Watched(backend)
        loss_on(ddp, 0, 0, 2).backward()
        plain = watched.bytes_sent
        watched.clear()
        take_step(ddp, backend.rank, [[2], [3]])
        return [event.split()[0] for event in watched.events], watched.bytes_sent - plain

    for names, sent in simulate(run, 2):
        assert names == ["all_gather", "all_reduce", "all_reduce"]
        assert sent == 16 + 8


# Ranks that add nothing ---------------------------------------------------------------------------


class Fragile(nn.Module):
    """A model that makes NaN of rows that are zeros, as attention does where all is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x / x.norm(dim=1, keepdim=True))


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("bad", ["loss", "inside"])
def test_a_rank_of_weight_0_adds_nothing_even_if_it_computes_nan(wrap: Wrapping, bad: str):
    def make() -> nn.Module:
        return seeded(Fragile).double()

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped, rank = wrap(model, backend), backend.rank
        for shift in (0, 10):  # the gradients of the first step are kept
            with wrapped.step(0 if rank else 3, micro_batches=2) as step:
                for number in range(2):
                    x, y = batch(rank, shift + number, 2 - number)
                    x = x * 0 if rank and bad == "inside" else x
                    loss = sum_of_losses(wrapped(x), y)
                    step.backward(loss * math.nan if rank and bad == "loss" else loss)
        return gradient_pieces(wrapped), step.loss

    found = wrap.on_ranks(3, make, body)
    plain = make()
    losses = [alone(plain, [[2, 1]], shift=shift).item() for shift in (0, 10)]
    assert_equal_to_rounding(joined([pieces for pieces, _ in found]), gradients(plain))
    assert all(abs(loss - losses[1]) <= 1e-12 * losses[1] for _, loss in found)


def test_a_step_after_one_of_weight_0_counts_again():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(build(), backend)
        take_step(ddp, backend.rank, [[3], [0]])
        ddp.zero_grad()
        take_step(ddp, backend.rank, [[3], [2]])
        return gradients(ddp)

    for found in simulate(run, 2):
        assert_equal_to_rounding(found, gradients_alone([[3], [2]]))


@few
def test_steps_add_up_if_gradients_are_kept(wrap: Wrapping):
    splits = [[[2], [1, 3], []], [[], [1], [2, 2]], [[1, 1], [0], [2]]]

    def steps(model: Any, rank: int) -> None:
        for number, split in enumerate(splits):
            take_step(model, rank, split, shift=10 * number)

    plain = build()
    for number, split in enumerate(splits):
        alone(plain, split, shift=10 * number)
    (found,) = wrap.gradients(3, build, steps)
    assert_equal_to_rounding(found, gradients(plain))


# Models -------------------------------------------------------------------------------------------


@few
def test_frozen_parameters_get_no_gradient(wrap: Wrapping):
    def make() -> nn.Module:
        model = build()
        model[2].requires_grad_(False)
        model[0].bias.requires_grad_(False)
        return model

    (found,) = gradients_of_steps(wrap, UNEVEN, make=make)
    assert_equal_to_rounding(found, gradients_alone(UNEVEN, make))


class Whole(nn.Module):
    """Branches in one unit: ranks may use other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()

    def forward(self, x: Tensor, *names: str) -> Tensor:
        return self.branches(x, *names)


@pytest.mark.checkered
@few
@pytest.mark.parametrize("used", [("left", "right", "left"), ("left", "left", "left")], ids=str)
def test_parameters_may_be_unused_in_some_micro_batches_or_in_all(wrap: Wrapping, used: Any):
    def make() -> nn.Module:
        return seeded(Whole).double()

    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        x, y = batch(rank, number, rows)
        return sum_of_losses(model(x, used[(rank + number) % 3]), y)

    def take(model: Any, rank: int, split: Split) -> None:
        take_step(model, rank, split, loss=loss)

    (found,) = gradients_of_steps(wrap, UNEVEN, make=make, take=take, ddp=UNUSED)
    assert_equal_to_rounding(found, gradients_alone(UNEVEN, make, loss=loss))


@every_wrapping(among=[WITH_DDP, SHARDED, REPLICATED])
def test_a_unit_that_only_an_earlier_micro_batch_uses_is_averaged(wrap: Wrapping):
    """Of the last ones, which average, none uses it."""

    def make() -> nn.Module:
        return seeded(Branches).double()

    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        x, y = batch(rank, number, rows)
        return sum_of_losses(model(x, "left" if number == 0 else "right"), y)

    def take(model: Any, rank: int, split: Split) -> None:
        take_step(model, rank, split, loss=loss)

    split = [[1], [2, 3], [2, 1]]
    (found,) = gradients_of_steps(wrap, split, make=make, take=take, ddp=UNUSED)
    assert_equal_to_rounding(found, gradients_alone(split, make, loss=loss))


def test_a_unit_that_only_a_rank_with_fewer_micro_batches_uses_is_averaged():
    """NO_SHARD: to use one needs no other rank. The leader has not used it at all."""

    def make() -> nn.Module:
        return seeded(Branches).double()

    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        x, y = batch(rank, number, rows)
        return sum_of_losses(model(x, "left" if rank == 0 else "right"), y)

    def take(model: Any, rank: int, split: Split) -> None:
        for shift in (0, 10):
            take_step(model, rank, split, loss=loss, shift=shift)

    split = [[1], [2, 3]]
    plain = make()
    alone(plain, split, loss=loss)
    alone(plain, split, loss=loss, shift=10)
    (found,) = gradients_of_steps(REPLICATED, split, make=make, take=take)
    assert_equal_to_rounding(found, gradients(plain))


class Twice(nn.Module):
    """Units that are called in another order in every second micro-batch, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.units[number](x))
        return self.head(x)


@pytest.mark.checkered
@every_wrapping(among=[SHARDED, BY_MESSAGES])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_units_may_be_called_in_another_order_and_twice(wrap: Wrapping, prefetch: int):
    def make() -> nn.Module:
        return seeded(Twice).double()

    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        x, y = batch(rank, number, rows)
        return sum_of_losses(model(x, [[0, 1, 2], [2, 0, 0, 1]][number % 2]), y)

    def take(model: Any, rank: int, _: Split) -> None:
        for number, split in enumerate([UNEVEN, [[], [1, 2], [1]], UNEVEN]):
            take_step(model, rank, split, loss=loss, shift=10 * number)

    plain = make()
    for number, split in enumerate([UNEVEN, [[], [1, 2], [1]], UNEVEN]):
        alone(plain, split, loss=loss, shift=10 * number)
    (found,) = gradients_of_steps(wrap, UNEVEN, make=make, take=take, fsdp={"prefetch": prefetch})
    assert_equal_to_rounding(found, gradients(plain))


@every_wrapping(among=[SHARDED, BY_MESSAGES])
def test_groups_that_were_prefetched_by_hand_are_gathered_as_often_on_every_rank(wrap: Wrapping):
    def take(model: Any, rank: int, split: Split) -> None:
        model.prefetch_forward_params()
        take_step(model, rank, split)
        assert not model.has_pending_prefetch()
        take_step(model, rank, split, shift=10)

    plain = build()
    alone(plain, UNEVEN)
    alone(plain, UNEVEN, shift=10)
    (found,) = gradients_of_steps(wrap, UNEVEN, take=take)
    assert_equal_to_rounding(found, gradients(plain))


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=str)
def test_hybrid_averages_between_shard_groups_and_counts_a_replica_once_in_the_norm(where: Any):
    wrap = Wrapping(FSDP, {"strategy": ShardingStrategy.hybrid(2)}, where)
    split = [[2, 1], [], [1, 3, 2], [0]]
    right = gradients_alone(split)
    norm = torch.stack([grad.norm() for grad in right.values()]).norm().item()

    def take(model: Any, rank: int, split: Split) -> None:
        take_step(model, rank, split)
        assert phalanx.clip_grad_norm_(model, 1e9).item() == pytest.approx(norm, rel=1e-12)

    (found,) = gradients_of_steps(wrap, split, take=take)
    assert_equal_to_rounding(found, right)


@pytest.mark.checkered
@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_may_be_computed_again(wrap: Wrapping, reentrant: bool):
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant)
            return self.last(torch.tanh(checkpoint(self.second, x, use_reentrant=reentrant)))

    def make() -> nn.Module:
        return seeded(Again).double()

    (found,) = gradients_of_steps(wrap, UNEVEN, make=make)
    assert_equal_to_rounding(found, gradients_alone(UNEVEN, make))


@every_wrapping(among=sizes([WITH_DDP], [WITH_DDP, SHARDED]))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at all of it
def test_the_inner_module_may_be_compiled(wrap: Wrapping):
    torch._dynamo.reset()

    def compiled() -> nn.Module:
        model = build()
        for layer in model:
            layer.compile(backend="aot_eager")
        return model

    split = [[2, 2], [], [2]]

    def take(model: Any, rank: int, split: Split) -> None:
        own = split[rank]
        with model.step(2 * (rank == 0), micro_batches=len(own)) as step:  # rank 2 adds nothing
            for number, rows in enumerate(own):
                step.backward(loss_on(model, rank, number, rows))

    (found,) = gradients_of_steps(wrap, split, make=compiled, take=take)
    expected = gradients_alone([[2, 2]])
    assert_equal_to_rounding({n: g / 2 for n, g in found.items()}, expected)  # 4 rows, not 2


def test_sparse_rows_of_an_embedding_are_averaged():
    def make() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)))

    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        draw = torch.Generator().manual_seed(10 * rank + number)
        return model(torch.randint(9, (rows,), generator=draw)).pow(2).sum()

    def run(backend: Backend) -> Gradients:
        ddp = DDP(make().double(), backend)
        for shift in (0, 10):
            step = take_step(ddp, backend.rank, UNEVEN, loss=loss, shift=shift)
        assert step.loss > 0
        return gradients(ddp)

    plain = make().double()
    for shift in (0, 10):
        alone(plain, UNEVEN, loss=loss, shift=shift)
    for found in simulate(run, 3):
        assert_equal_to_rounding(found, gradients(plain))


def test_sync_batch_norm_mixes_the_ranks_where_they_have_as_many_micro_batches():
    def make() -> nn.Module:
        return seeded(
            lambda: nn.Sequential(
                nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
            )
        ).double()

    split = [[2, 3], [4, 0], [0, 0]]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(convert_sync_batchnorm(make(), backend), backend, broadcast_buffers=False)
        take_step(ddp, backend.rank, split)
        return gradients(ddp)

    plain = make()
    for number in range(2):
        parts = [batch(rank, number, own[number]) for rank, own in enumerate(split)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        (sum_of_losses(plain(x), y) / 9).backward()
    for found in simulate(run, 3):
        assert_equal_to_rounding(found, gradients(plain), 1e-10)


class Counts(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("passes", torch.tensor(float(start)))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.layer(x)


def test_buffers_are_those_of_the_rank_with_the_most_micro_batches():
    """At the beginning of the forward passes that are averaged."""

    def run(backend: Backend) -> float:
        ddp = DDP(Counts(100 * backend.rank), backend)
        take_step(ddp.float(), backend.rank, [[2], [], [1, 1, 1]], loss=single)
        return ddp.module.passes.item()

    def single(model: Any, rank: int, number: int, rows: int) -> Tensor:
        return model(noise(rows, 6)).sum()

    assert list(simulate(run, 3)) == [3.0, 2.0, 3.0]


@both
def test_a_micro_batch_may_need_several_forward_passes_and_evaluation(wrap: Wrapping):
    def loss(model: Any, rank: int, number: int, rows: int) -> Tensor:
        x, y = batch(rank, number, rows)
        with torch.no_grad():
            target = model(y.repeat(1, 2))
        return sum_of_losses(model(x), target) + sum_of_losses(model(x + 1), y)

    def take(model: Any, rank: int, split: Split) -> None:
        take_step(model, rank, split, loss=loss)

    (found,) = gradients_of_steps(wrap, UNEVEN, take=take)
    assert_equal_to_rounding(found, gradients_alone(UNEVEN, loss=loss))


@few
def test_evaluation_between_micro_batches_changes_nothing_where_ranks_have_as_many(wrap: Wrapping):
    split = [[2, 1], [1, 3]]

    def take(model: Any, rank: int, split: Split) -> None:
        own = split[rank]
        with model.step(sum(own), micro_batches=2) as step:
            for number, rows in enumerate(own):
                step.backward(loss_on(model, rank, number, rows))
                model.eval()
                with torch.no_grad():
                    model(batch(rank, number, 2)[0])
                model(batch(rank, number, 2)[0])  # with a graph, that nobody goes back
                model.train()
        take_step(model, rank, split, shift=10)  # nothing is left over of the passes before

    plain = build()
    alone(plain, split)
    alone(plain, split, shift=10)
    (found,) = gradients_of_steps(wrap, split, take=take)
    assert_equal_to_rounding(found, gradients(plain))


@few
def test_a_graph_may_be_kept_for_a_second_backward_pass(wrap: Wrapping):
    def take(model: Any, rank: int, split: Split) -> None:
        with model.step(3, micro_batches=2) as step:
            loss = loss_on(model, rank, 0, 3)
            step.backward(loss, retain_graph=True)
            step.backward(2 * loss)
        assert step.weight == 6

    (found,) = gradients_of_steps(wrap, [[3], [3]], take=take)
    expected = gradients_alone([[3], [3]])
    assert_equal_to_rounding({n: g / 3 for n, g in found.items()}, expected)


@few
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_may_have_graphs(wrap: Wrapping):
    def take(model: Any, rank: int, split: Split) -> None:
        own = split[rank]
        with model.step(sum(own), micro_batches=len(own)) as step:
            for number, rows in enumerate(own):
                step.backward(loss_on(model, rank, number, rows), create_graph=True)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.detach()

    (found,) = gradients_of_steps(wrap, UNEVEN, take=take)
    assert_equal_to_rounding(found, gradients_alone(UNEVEN))


def test_data_x_tensor_counts_on_the_data_axis():
    """The ranks of parallel layers have one part together."""
    rows, weights = [(0, 1), (1, 4)], [1.0, 3.0]

    def loss(model: Any, part: int) -> tuple[Tensor, Tensor]:
        inputs, targets = text(4, seed=1)
        return model(inputs[slice(*rows[part])]), targets[slice(*rows[part])]

    def run(backend: Backend) -> Any:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        tensor, part = mesh["tensor"], mesh["data"].rank
        model = DDP(phalanx.parallelize(transformer(), tensor, plan_for()), mesh["data"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.step(weights[part]) as step:
            outputs, targets = loss(model, part)
            mean = parallel_cross_entropy(outputs, tensor, targets, num_classes=VOCABULARY)
            step.backward(mean * weights[part])
        norm = phalanx.clip_grad_norm_(model, 0.5)
        optimizer.step()
        return full_state_dict(model), norm.item(), step.loss

    plain = transformer()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    total = 0.0
    for part in range(2):
        outputs, targets = loss(plain, part)
        mean = F.cross_entropy(outputs.flatten(0, -2), targets.flatten()) * weights[part] / 4
        mean.backward()
        total += mean.item()
    right = nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
    optimizer.step()
    for state, norm, found in simulate(run, 4):
        assert found == pytest.approx(total, rel=1e-5)
        assert norm == pytest.approx(right, rel=1e-5)
        assert_equal_to_rounding(state, plain.state_dict(), 1e-5)

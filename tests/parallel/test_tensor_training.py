"""A transformer whose layers lie on several ranks computes, and learns, what the plain one does."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import Watched, assert_same_bits
from forms import sizes
from tensor_models import (
    HEADS,
    VOCABULARY,
    NormedHeads,
    assert_all_close,
    batch,
    plain_gradients,
    plain_loss,
    plan_for,
    transformer,
    whole_gradients,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import Backend, parallelize, simulate
from phalanx.tensor import ColumnStyle, RowStyle, full_state_dict, parallel_cross_entropy

STEPS = 3


def trained_alone(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the parameters afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(seed=step)
        loss = plain_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained_together(model: nn.Module, backend: Backend) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(seed=step)
        logits = model(inputs)
        loss = parallel_cross_entropy(logits, backend, targets, num_classes=VOCABULARY)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, full_state_dict(model)


@pytest.mark.parametrize(
    ("world_size", "sequence_dim"),
    [
        *((size, None) for size in sizes((1, 2, 4, 7), range(1, 9))),
        *((size, 1) for size in sizes((2, 3, 8), (1, 2, 3, 5, 8))),
    ],
)
def test_training_equals_the_plain_models(world_size: int, sequence_dim: int | None):
    """6 positions, 13 words, 48 features and 8 heads divide by few of these rank counts."""
    losses, state = trained_alone(transformer())

    def run(backend: Backend) -> tuple[list[float], dict[str, Tensor]]:
        model = parallelize(transformer(), backend, plan_for(sequence_dim=sequence_dim))
        return trained_together(model, backend)

    for found, whole in simulate(run, world_size):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_all_close(whole, state)


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize(("heads", "world_size"), [(8, 4), (5, 2), (7, 4)])
def test_heads_are_split_and_none_is_torn(heads: int, world_size: int, sequence_dim: int | None):
    plain = transformer(heads)
    inputs, targets = batch(2, 5)
    expected = plain(inputs)
    plain_loss(expected, targets).backward()

    def run(backend: Backend) -> tuple[Tensor, dict[str, Tensor], list[int]]:
        model = parallelize(transformer(heads), backend, plan_for(heads, sequence_dim=sequence_dim))
        logits = model(inputs)
        parallel_cross_entropy(logits, backend, targets, num_classes=VOCABULARY).backward()
        return logits, whole_gradients(model), list(model.blocks[0].qkv.weight.shape)

    results = simulate(run, world_size)
    torch.testing.assert_close(torch.cat([logits for logits, _, _ in results], -1), expected)
    for _, found, _ in results:
        assert_all_close(found, plain_gradients(plain))
    rows = [shape[0] for _, _, shape in results]
    assert sum(rows) == 3 * heads * 2
    assert all(count % 6 == 0 for count in rows)


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("world_size", [1, 3])
def test_tied_weights_stay_tied_where_the_plan_cuts_them_alike(
    world_size: int, sequence_dim: int | None
):
    losses, state = trained_alone(transformer(tied=True))

    def run(backend: Backend) -> tuple[list[float], dict[str, Tensor]]:
        model = parallelize(transformer(tied=True), backend, plan_for(sequence_dim=sequence_dim))
        assert model.head.weight is model.embed.weight
        return trained_together(model, backend)

    for found, whole in simulate(run, world_size):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_all_close(whole, state)


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_what_is_whole_stays_the_same_bits_on_every_rank(sequence_dim: int | None):
    def run(backend: Backend) -> dict[str, Tensor]:
        model = parallelize(transformer(), backend, plan_for(sequence_dim=sequence_dim))
        trained_together(model, backend)
        return {
            name: value
            for name, value in model.state_dict().items()
            if "norm" in name or name.endswith(("mix.bias", "down.bias"))
        }

    found = list(simulate(run, 3))
    assert len(found[0]) == 2 + 1 + 2 + 2
    assert_same_bits(found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_activations_may_be_computed_again_in_backward(sequence_dim: int | None, reentrant: bool):
    plain = transformer()
    inputs, targets = batch()
    plain_loss(plain(inputs), targets).backward()

    def run(backend: Backend) -> dict[str, Tensor]:
        model = parallelize(transformer(), backend, plan_for(sequence_dim=sequence_dim))
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
        logits = model(inputs)
        parallel_cross_entropy(logits, backend, targets, num_classes=VOCABULARY).backward()
        return whole_gradients(model)

    for found in simulate(run, 2):
        assert_all_close(found, plain_gradients(plain))


def test_a_copy_of_a_model_speaks_to_the_same_ranks():
    inputs, _ = batch()

    def run(backend: Backend) -> None:
        model = parallelize(transformer(), backend, plan_for())
        twin = copy.deepcopy(model)
        assert twin.head.backend is backend
        assert twin.head.weight is not model.head.weight
        assert torch.equal(twin(inputs), model(inputs))

    simulate(run, 2)


def test_without_gradients_and_in_bfloat16_it_computes_too():
    inputs, _ = batch()
    expected = transformer().eval()(inputs)
    coarse = transformer().bfloat16()(inputs)

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        model = parallelize(transformer(), backend, plan_for(sequence_dim=1)).eval()
        with torch.inference_mode():
            logits = model(inputs)
        half = parallelize(transformer().bfloat16(), backend, plan_for())
        return logits, half(inputs)

    results = simulate(run, 3)
    torch.testing.assert_close(torch.cat([r[0] for r in results], -1), expected)
    torch.testing.assert_close(torch.cat([r[1] for r in results], -1), coarse, rtol=0.1, atol=0.1)


def test_a_norm_of_this_ranks_heads_learns_from_all_heads():
    plain, x = seeded(NormedHeads), noise(2, 5, 16)
    y = plain(x)
    y.pow(2).sum().backward()
    column = ColumnStyle(unit=4)
    plan = {**dict.fromkeys("qkv", column), "mix": RowStyle(unit=4), "*_norm": "sequence_norm"}

    def run(backend: Backend) -> tuple[Tensor, dict[str, Tensor]]:
        model = parallelize(seeded(NormedHeads), backend, plan)
        found = model(x)
        found.pow(2).sum().backward()
        return found, whole_gradients(model)

    for found, gradients in simulate(run, 3):
        torch.testing.assert_close(found, y)
        assert_all_close(gradients, plain_gradients(plain))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (0, 4)])
def test_a_sequence_may_be_shorter_than_there_are_ranks(shape: tuple[int, int]):
    plain, (inputs, targets) = transformer(), batch(*shape)
    plain_loss(plain(inputs), targets).backward()

    def run(backend: Backend) -> dict[str, Tensor]:
        model = parallelize(transformer(), backend, plan_for(sequence_dim=1))
        logits = model(inputs)
        parallel_cross_entropy(logits, backend, targets, num_classes=VOCABULARY).backward()
        return whole_gradients(model)

    for found in simulate(run, 3):
        assert_all_close(found, {n: g.nan_to_num() for n, g in plain_gradients(plain).items()})


def test_under_autocast_it_computes_in_the_plain_models_dtypes():
    plain, (inputs, _) = transformer(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected, stream = plain(inputs), plain.blocks[0].down(torch.ones(2, 48))

    def run(backend: Backend) -> Tensor:
        model = parallelize(transformer(), backend, plan_for())
        with torch.autocast("cpu", torch.bfloat16):
            assert model.blocks[0].down(torch.ones(2, 24)).dtype is stream.dtype
            return model(inputs)

    logits = torch.cat(list(simulate(run, 2)), -1)
    torch.testing.assert_close(logits, expected, rtol=0.1, atol=0.1)


# What it costs ------------------------------------------------------------------------------


def traffic(sequence_dim: int | None, world_size: int = 4) -> tuple[list[str], int, list[str], int]:
    """The collectives of a block's forward and backward pass, and the bytes of all ranks."""
    x = torch.randn(2, 8, HEADS * 2, generator=torch.Generator().manual_seed(0))

    def run(backend: Backend) -> tuple[list[str], int, list[str], int]:
        plan = {
            name.removeprefix("blocks.*."): style
            for name, style in plan_for(sequence_dim=sequence_dim).items()
            if name.startswith(("blocks", "*norm*"))
        }
        block = parallelize(transformer().blocks[0], backend, plan)
        block.requires_grad_(sequence_dim is None)  # else gradients of norms and biases, too
        rank = backend.rank
        mine = x if sequence_dim is None else x[:, 2 * rank : 2 * rank + 2]
        mine = mine.clone().requires_grad_()
        watched = Watched(backend)
        y = block(mine)
        forward = [event.split()[0] for event in watched.events], watched.bytes_sent
        watched.clear()
        y.sum().backward()
        return *forward, [event.split()[0] for event in watched.events], watched.bytes_sent

    results = simulate(run, world_size)
    assert len({tuple(r[0] + r[2]) for r in results}) == 1
    first = results[0]
    return first[0], sum(r[1] for r in results), first[2], sum(r[3] for r in results)


def test_a_block_costs_two_all_reduces_forward_and_two_backward():
    """Shoeybi et al. 2019, figure 4: b s h numbers each, 2(p-1)/p of them from each rank."""
    n = 4 * 2 * 8 * HEADS * 2
    forward, sent, backward, sent_back = traffic(None)
    assert forward == backward == ["all_reduce"] * 2
    assert sent == sent_back == 2 * 2 * 3 * n


def test_along_the_sequence_it_costs_the_same_bytes():
    """Korthikanti et al. 2022, section 4.2.2: a ring all_reduce is a reduce_scatter and an
    all_gather. Here with two more messages of 8 bytes, which tell how long the sequence is."""
    n = 4 * 2 * 8 * HEADS * 2
    forward, sent, backward, sent_back = traffic(1)
    assert forward == ["all_gather", "all_gather", "reduce_scatter"] * 2
    assert sent == 2 * 2 * 3 * n + 2 * 4 * 3 * 8
    assert backward == ["all_gather", "reduce_scatter"] * 2
    assert sent_back == 2 * 2 * 3 * n

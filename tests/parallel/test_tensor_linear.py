"""Column- and row-parallel linears, and the embedding: the plain layer, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import Watched, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_models import assert_all_close, plain_gradients, whole_gradients
from torch import Tensor, nn

from phalanx import (
    Backend,
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    SimulatedBackend,
    SizeMismatchError,
    UnsupportedOperationError,
    simulate,
)
from phalanx.tensor import SequenceParallelNorm
from phalanx.tensor.shards import ShardSpec


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    layer = seeded(lambda: nn.Linear(inputs, outputs, bias=bias))
    assert isinstance(layer, nn.Linear)
    return layer


def one_of(size: int) -> Backend:
    """A rank of several, of which the others do nothing: whatever is sent is never answered."""
    return SimulatedBackend.create_group(size, timeout=1.0)[0]


Result = tuple[Tensor, Tensor, dict[str, Tensor]]


def backward(layer: nn.Module, x: Tensor, v: Tensor) -> Result:
    """The output, the input's gradient, and the parameters'."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(v)
    assert x.grad is not None
    return y.detach(), x.grad, whole_gradients(layer)


def expected_of(layer: nn.Module, x: Tensor, v: Tensor) -> Result:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(v)
    assert x.grad is not None
    return y.detach(), x.grad, plain_gradients(layer)


@settings(max_examples=20)
@given(
    ranks=st.integers(1, 8),
    inputs=st.integers(1, 20),
    more=st.integers(0, 12),
    bias=st.booleans(),
    gather=st.booleans(),
    sequence=st.booleans(),
    length=st.integers(1, 9),
    negative=st.booleans(),
)
def test_a_column_linear_is_the_plain_one(
    ranks: int,
    inputs: int,
    more: int,
    bias: bool,
    gather: bool,
    sequence: bool,
    length: int,
    negative: bool,
):
    plain = linear(inputs, ranks + more, bias=bias)
    x, v = noise(2, length, inputs), noise(2, length, ranks + more, seed=1)
    y, dx, gradients = expected_of(plain, x, v)
    along = ShardSpec.of(length, ranks)
    columns = ShardSpec.of(ranks + more, ranks)

    def run(backend: Backend) -> Result:
        rank = backend.rank
        dim = (-2 if negative else 1) if sequence else None
        layer = ColumnParallelLinear.from_linear(
            plain, backend, gather_output=gather, sequence_dim=dim
        )
        mine = along.shard(x, 1, rank) if sequence else x
        return backward(layer, mine, v if gather else columns.shard(v, 2, rank))

    results = list(simulate(run, ranks))
    found = columns.join([r[0] for r in results], 2) if not gather else results[0][0]
    torch.testing.assert_close(found, y)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result[1], along.shard(dx, 1, rank) if sequence else dx)
        assert_all_close(result[2], gradients)


@settings(max_examples=20)
@given(
    ranks=st.integers(1, 8),
    more=st.integers(0, 12),
    outputs=st.integers(1, 20),
    bias=st.booleans(),
    parallel=st.booleans(),
    sequence=st.booleans(),
    length=st.integers(1, 9),
)
def test_a_row_linear_is_the_plain_one(
    ranks: int, more: int, outputs: int, bias: bool, parallel: bool, sequence: bool, length: int
):
    plain = linear(ranks + more, outputs, bias=bias)
    x, v = noise(2, length, ranks + more), noise(2, length, outputs, seed=1)
    y, dx, gradients = expected_of(plain, x, v)
    along = ShardSpec.of(length, ranks)
    rows = ShardSpec.of(ranks + more, ranks)

    def run(backend: Backend) -> Result:
        rank = backend.rank
        layer = RowParallelLinear.from_linear(
            plain, backend, input_is_parallel=parallel, sequence_dim=1 if sequence else None
        )
        mine = rows.shard(x, 2, rank) if parallel else x
        return backward(layer, mine, along.shard(v, 1, rank) if sequence else v)

    results = list(simulate(run, ranks))
    if sequence:
        torch.testing.assert_close(along.join([r[0] for r in results], 1), y)
    else:
        assert_same_bits([{"y": r[0]} for r in results])
        torch.testing.assert_close(results[0][0], y)
    if parallel:
        torch.testing.assert_close(rows.join([r[1] for r in results], 2), dx)
    for result in results:
        assert_all_close(result[2], gradients)
        if not parallel:
            torch.testing.assert_close(result[1], dx)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 2)])
def test_inputs_may_have_any_number_of_dimensions(shape: tuple[int, ...]):
    x = noise(*shape, 6)
    first, second = linear(6, 7), linear(7, 5)
    expected = second(torch.relu(first(x)))

    def run(backend: Backend) -> Tensor:
        up = ColumnParallelLinear.from_linear(first, backend)
        down = RowParallelLinear.from_linear(second, backend)
        return down(torch.relu(up(x)))

    for y in simulate(run, 3):
        torch.testing.assert_close(y, expected)


def test_several_layers_in_one_are_each_cut_by_itself():
    """Queries of 6 heads, keys and values of 2: a rank has its heads of each."""
    plain = linear(5, (6 + 2 + 2) * 4)
    x = noise(3, 5)
    q, k, v = plain(x).split([24, 8, 8], -1)

    def run(backend: Backend) -> list[Tensor]:
        layer = ColumnParallelLinear.from_linear(plain, backend, parts=[24, 8, 8], unit=4)
        return list(layer(x).split([12, 4, 4], -1))

    for rank, own in enumerate(simulate(run, 2)):
        for whole, part in zip((q, k, v), own, strict=True):
            torch.testing.assert_close(part, whole.chunk(2, -1)[rank])


# Initial values -----------------------------------------------------------------------------

BUILDERS: dict[str, tuple[Callable[[Backend], nn.Module], Callable[[], nn.Module]]] = {
    "column": (lambda b: ColumnParallelLinear(5, 7, b), lambda: nn.Linear(5, 7)),
    "row": (lambda b: RowParallelLinear(7, 5, b, bias=False), lambda: nn.Linear(7, 5, bias=False)),
    "embedding": (
        lambda b: ParallelEmbedding(7, 3, b, padding_idx=4),
        lambda: nn.Embedding(7, 3, padding_idx=4),
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", BUILDERS)
def test_initial_values_are_those_of_a_plain_layer_whatever_the_ranks(kind: str, ranks: int):
    ours, plain = BUILDERS[kind]

    def built(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        layer = build()
        after = torch.rand(1)  # the random state has moved as far
        return {name: p.detach() for name, p in layer.named_parameters()}, after

    def run(backend: Backend) -> tuple[list[tuple[str, Tensor, int, ShardSpec]], Tensor]:
        torch.manual_seed(3)
        layer: Any = ours(backend)
        after = torch.rand(1)
        return [
            (name, p.detach(), *layer.splits.get(name, (0, None)))
            for name, p in layer.named_parameters()
        ], after

    values, after = built(plain)
    results = simulate(run, ranks)
    for rank, (parts, moved) in enumerate(results):
        assert torch.equal(moved, after)
        assert [name for name, *_ in parts] == list(values)
        for name, part, dim, cut in parts:
            assert torch.equal(part, cut.shard(values[name], dim, rank)), name


def test_a_frozen_layer_stays_frozen_and_modes_and_dtypes_are_kept():
    plain = linear(4, 6).double().eval().requires_grad_(False)

    def run(backend: Backend) -> None:
        for layer in (
            ColumnParallelLinear.from_linear(plain, backend),
            RowParallelLinear.from_linear(plain, backend),
        ):
            assert not layer.training
            assert all(not p.requires_grad for p in layer.parameters())
            assert all(p.dtype is torch.float64 for p in layer.parameters())
            before = plain.weight.clone()
            layer.weight.fill_(7)
            assert torch.equal(plain.weight, before)

    simulate(run, 2)


def test_a_layer_says_what_it_is_a_part_of():
    def run(backend: Backend) -> str:
        return repr(ColumnParallelLinear.from_linear(linear(4, 7), backend))

    whole = "ColumnParallelLinear(in_features=4, out_features=7, bias=True"
    assert list(simulate(run, 2)) == [
        f"{whole}, rank 0 of 2: 4 of 7)",
        f"{whole}, rank 1 of 2: 3 of 7)",
    ]


# The embedding ------------------------------------------------------------------------------


@pytest.mark.checkered
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [None, 0, 4, -1])
@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_an_embedding_is_the_plain_one_to_the_bit(
    ranks: int, sequence_dim: int | None, padding: int | None, dtype: torch.dtype
):
    plain = seeded(lambda: nn.Embedding(9, 4, padding_idx=padding))
    tokens = torch.tensor([[0, 4, 8, 8], [3, 4, 5, 0]], dtype=dtype)
    v = noise(2, 4, 4)
    y = plain(tokens)
    y.backward(v)
    gradients = plain_gradients(plain)
    along = ShardSpec.of(4, ranks)

    def run(backend: Backend) -> tuple[Tensor, dict[str, Tensor]]:
        layer = ParallelEmbedding.from_embedding(plain, backend, sequence_dim=sequence_dim)
        mine = layer(tokens)
        mine.backward(along.shard(v, 1, backend.rank) if sequence_dim is not None else v)
        return mine.detach(), whole_gradients(layer)

    for rank, (mine, found) in enumerate(simulate(run, ranks)):
        assert torch.equal(mine, along.shard(y, 1, rank) if sequence_dim is not None else y)
        assert_all_close(found, gradients)


def test_no_tokens_are_no_vectors():
    plain = seeded(lambda: nn.Embedding(9, 4))
    nothing = torch.empty(0, 3, dtype=torch.int64)
    for y in simulate(lambda b: ParallelEmbedding.from_embedding(plain, b)(nothing).shape, 2):
        assert y == (0, 3, 4)


@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_that_nobody_has_is_refused_on_every_rank(token: int):
    plain = seeded(lambda: nn.Embedding(9, 4))

    def run(backend: Backend) -> None:
        layer = ParallelEmbedding.from_embedding(plain, backend)
        watched = Watched(backend)
        with pytest.raises(IndexError, match=rf"token {token} is not in the vocabulary of 9"):
            layer(torch.tensor([3, token]))
        with pytest.raises(TypeError, match="int64"):
            layer(torch.ones(3))
        assert not watched.events

    simulate(run, 2)


# A norm along the sequence ------------------------------------------------------------------

NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(6),
    "without bias": lambda: nn.LayerNorm(6, bias=False),
    "without parameters": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(6, eps=0.1),
    "RMSNorm without parameters": lambda: nn.RMSNorm(6, elementwise_affine=False),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_a_part_of_the_sequence_learns_from_the_whole(norm: str):
    plain: Any = NORMS[norm]()
    for p in plain.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    x, v = noise(2, 5, 6), noise(2, 5, 6, seed=1)
    y, dx, gradients = expected_of(plain, x, v)
    along = ShardSpec.of(5, 3)

    def run(backend: Backend) -> Result:
        layer = SequenceParallelNorm.from_norm(plain, backend)
        return backward(layer, along.shard(x, 1, backend.rank), along.shard(v, 1, backend.rank))

    results = simulate(run, 3)
    torch.testing.assert_close(torch.cat([r[0] for r in results], 1), y)
    torch.testing.assert_close(torch.cat([r[1] for r in results], 1), dx)
    for _, _, found in results:
        assert_all_close(found, gradients)


# What is refused ----------------------------------------------------------------------------

WRONG_SIZES: dict[str, tuple[Callable[[Backend], nn.Module], str]] = {
    "columns": (lambda b: ColumnParallelLinear(9, 3, b), "out_features 3 .* 4 ranks"),
    "rows": (lambda b: RowParallelLinear(3, 9, b), "in_features 3 .* 4 ranks"),
    "words": (lambda b: ParallelEmbedding(3, 9, b), "num_embeddings 3 .* 4 ranks"),
    "heads": (lambda b: ColumnParallelLinear(9, 12, b, unit=4), "3 units of 4.* 4 ranks"),
    "torn": (lambda b: RowParallelLinear(18, 9, b, unit=4), "not a multiple of unit=4"),
    "no unit": (lambda b: RowParallelLinear(18, 9, b, unit=0), "unit=0"),
    "parts": (lambda b: ColumnParallelLinear(9, 12, b, parts=(5, 6)), "11 outputs, .* has 12"),
    "a small part": (lambda b: ColumnParallelLinear(9, 12, b, parts=(9, 3)), "3 elements"),
}


@pytest.mark.parametrize("case", WRONG_SIZES)
def test_sizes_that_cannot_be_cut_are_refused_before_anything_is_sent(case: str):
    build, message = WRONG_SIZES[case]
    with pytest.raises(ValueError, match=message):
        build(one_of(4))


class Louder(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 6)
    layer.register_forward_hook(lambda *_: None)
    return layer


WRONG_LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another kind": (lambda: nn.Embedding(4, 6), "of nn.Linear, not of .*Embedding"),
    "a subclass": (lambda: Louder(4, 6), "not of .*Louder"),
    "hooks": (hooked, "forward hooks"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), "not of"),
}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_a_layer_that_does_more_is_refused_before_anything_is_sent(case: str, kind: Any):
    build, message = WRONG_LAYERS[case]
    with pytest.raises(UnsupportedOperationError, match=message):
        kind.from_linear(build(), one_of(2))


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_an_embedding_with_options_that_it_has_not_is_refused(option: str):
    with pytest.raises(UnsupportedOperationError, match=f"has no {option}"):
        ParallelEmbedding.from_embedding(nn.Embedding(4, 6, **{option: True}), one_of(2))


def test_inputs_of_another_width_are_refused_before_anything_is_sent():
    def run(backend: Backend) -> None:
        column = ColumnParallelLinear.from_linear(linear(6, 8), backend)
        row = RowParallelLinear.from_linear(linear(6, 8), backend)
        own = RowParallelLinear.from_linear(linear(6, 8), backend, input_is_parallel=False)
        watched = Watched(backend)
        with pytest.raises(SizeMismatchError, match=r"takes 6 features here.*gather_output"):
            column(torch.ones(2, 3))
        with pytest.raises(SizeMismatchError, match=r"takes 3 features here.*part of 6.*parallel="):
            row(torch.ones(2, 6))
        with pytest.raises(SizeMismatchError, match=r"takes 6 features here.*input_is_parallel"):
            own(torch.ones(2, 3))
        with pytest.raises(SizeMismatchError, match=r"shape \[\]"):
            column(torch.tensor(1.0))
        assert not watched.events

    simulate(run, 2)


@pytest.mark.parametrize("dim", [-1, 2, 3, -4])
def test_the_sequence_cannot_lie_along_the_features_or_nowhere(dim: int):
    def run(backend: Backend) -> None:
        column = ColumnParallelLinear.from_linear(linear(6, 8), backend, sequence_dim=dim)
        row = RowParallelLinear.from_linear(linear(6, 8), backend, sequence_dim=dim)
        watched = Watched(backend)
        for layer, width in ((column, 6), (row, 3)):
            with pytest.raises(ValueError, match=f"sequence_dim={dim} of a tensor of shape"):
                layer(torch.ones(2, 5, width))
        assert not watched.events

    simulate(run, 2)

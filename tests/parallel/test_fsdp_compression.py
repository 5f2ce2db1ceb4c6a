"""FSDP with compression: gradients are reduced in another form, and nothing is lost on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import Branches, loss_of, mlp, noise, seeded, vectors
from ddp_runs import Gradients, Watched, assert_close, assert_same_bits, gradients, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    alone,
    gradient_pieces,
    joined,
    on_ranks,
)
from residuals import lacking
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    ErrorFeedback,
    GradScaler,
    MixedPrecision,
    PowerSGD,
    Quantized,
    ShardingStrategy,
    TopK,
    UnsupportedOperationError,
    simulate,
)
from phalanx.compression import Compressor, Half, RandomK

HYBRID = ShardingStrategy.hybrid(2)
KINDS: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: TopK(0.05),
    "random-k": lambda: RandomK(0.2),
    "bfloat16": Half,
    "8 bits": Quantized,
    "1 bit": lambda: Quantized(1, block=16),
    "PowerSGD": lambda: PowerSGD(1),
}
EXACT: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: ErrorFeedback(TopK(1)),
    "random-k": lambda: RandomK(1),
    "PowerSGD": lambda: PowerSGD(99),
}
SIZES = {
    name: p.numel() for model in (mlp(), seeded(Branches)) for name, p in model.named_parameters()
}
WAYS: list[tuple[int, ShardingStrategy, Cluster]] = [
    (1, FULL_SHARD, COOPERATIVE),
    (2, FULL_SHARD, COOPERATIVE),
    (3, FULL_SHARD, MESSAGES),
    (4, FULL_SHARD, COOPERATIVE),
    (2, SHARD_GRAD_OP, COOPERATIVE),
    (3, NO_SHARD, COOPERATIVE),
    (4, HYBRID, COOPERATIVE),
    (4, HYBRID, MESSAGES),
    (2, HYBRID, COMMON),  # which is FULL_SHARD
]
few = pytest.mark.parametrize(
    ("name", "ranks", "strategy"),
    [("top-k", 2, FULL_SHARD), ("PowerSGD", 2, NO_SHARD), ("1 bit", 4, HYBRID)],
    ids=str,
)  # of one round, of two, with something left over of means, too


def step(model: nn.Module, number: int, rank: int, scale: float = 1.0) -> None:
    inputs, targets = vectors(4, seed=10 * number + rank)
    (loss_of(model(inputs), targets) * scale).backward()


def own_gradient(number: int, rank: int) -> Gradients:
    plain = mlp()
    step(plain, number, rank)
    return gradients(plain)


def residuals_of(fsdp: FSDP | DDP) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in fsdp.own_state().items()}


# What it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "where"),
    [*(("PowerSGD", *one) for one in WAYS), ("top-k", *WAYS[2]), ("random-k", *WAYS[1])],
    ids=str,
)
def test_what_leaves_nothing_out_trains_like_plain_fsdp(
    name: str, ranks: int, strategy: Any, where: Cluster
):
    def body(compression: Compressor | None) -> Any:
        def run(model: nn.Module, backend: Backend) -> Any:
            fsdp = FSDP(model, backend, strategy=strategy, compression=compression)
            optimizer = torch.optim.SGD(fsdp.parameters(), 0.1, momentum=0.9)
            for number in range(3):
                optimizer.zero_grad()
                step(fsdp, number, backend.rank)
                optimizer.step()
            return fsdp.full_state_dict()

        return on_ranks(where, ranks, mlp, run)

    found = body(EXACT[name]())
    assert_same_bits(found)
    assert_close(found[0], body(None)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "where"),
    [
        *((name, 3, FULL_SHARD, COOPERATIVE) for name in KINDS),
        *((name, 4, HYBRID, COOPERATIVE) for name in KINDS),
        *(("PowerSGD", *one) for one in WAYS if one[0] < 4),
    ],
    ids=str,
)
def test_gradients_that_came_and_what_is_left_over_are_all_that_there_were(
    name: str, ranks: int, strategy: Any, where: Cluster
):
    """Over three passes; bit-identical where several ranks have the same shard."""

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, compression=ErrorFeedback(KINDS[name]()))
        came = []
        for number in range(3):
            fsdp.zero_grad()
            step(fsdp, number, backend.rank)
            came.append(gradient_pieces(fsdp))
        return came, residuals_of(fsdp)

    per_rank = on_ranks(where, ranks, mlp, body)
    missing = lacking([state for _, state in per_rank], SIZES)
    passes = [joined([came[number] for came, _ in per_rank]) for number in range(3)]
    for key in passes[0]:
        given = [own_gradient(n, r)[key].double() for n in range(3) for r in range(ranks)]
        total = sum(one[key].double() for one in passes).flatten() + missing[key]
        torch.testing.assert_close(total, sum(given).flatten() / ranks, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD], ids=str)
def test_where_matrices_stay_whole_power_sgd_is_that_of_ddp(strategy: Any):
    def train(model: Any, backend: Backend) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(3):
            optimizer.zero_grad()
            step(model, number, backend.rank)
            optimizer.step()

    def ddp(backend: Backend) -> Any:
        model = DDP(mlp(), backend, compression=ErrorFeedback(PowerSGD(1)))
        train(model, backend)
        return values(model.module)

    def fsdp(backend: Backend) -> Any:
        model = FSDP(mlp(), backend, strategy=strategy, compression=ErrorFeedback(PowerSGD(1)))
        train(model, backend)
        return model.full_state_dict()

    assert_close(simulate(fsdp, 3)[0], simulate(ddp, 3)[0], rtol=1e-4, atol=1e-5)


def test_one_rank_computes_what_a_ddp_of_one_does():
    def run(kind: Any, backend: Backend) -> Any:
        model = kind(mlp(), backend, compression=ErrorFeedback(PowerSGD(1)))
        for number in range(2):
            model.zero_grad()
            step(model, number, 0)
        return {n: g.flatten() for n, g in gradients(model).items()}

    found, expected = (simulate(lambda b, k=kind: run(k, b), 1)[0] for kind in (FSDP, DDP))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_it_works_on_every_kind_of_backend(cluster: Cluster):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, compression=ErrorFeedback(TopK(1)))
        step(fsdp, 0, backend.rank)
        return gradient_pieces(fsdp)

    found = joined(on_ranks(cluster, 3, mlp, body))
    losses = [
        lambda model, r=rank: loss_of(model(vectors(4, seed=r)[0]), vectors(4, seed=r)[1])
        for rank in range(3)
    ]
    assert_close(found, alone(mlp, losses), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@few
def test_in_mixed_precision_nothing_is_lost_either(
    name: str, ranks: int, strategy: Any, reduce_dtype: torch.dtype
):
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=reduce_dtype)

    def body(model: nn.Module, backend: Backend, compression: Any) -> Any:
        fsdp = FSDP(
            model, backend, strategy=strategy, mixed_precision=precision, compression=compression
        )
        fsdp(vectors(4, seed=backend.rank)[0]).float().pow(2).sum().backward()
        return gradient_pieces(fsdp), residuals_of(fsdp)

    def run(compression: Any) -> Any:
        found = on_ranks(COOPERATIVE, ranks, mlp, lambda m, b: body(m, b, compression))
        return joined([pieces for pieces, _ in found]), lacking(
            [state for _, state in found], SIZES
        )

    dense, _ = run(None)
    sent, missing = run(ErrorFeedback(KINDS[name]()))
    close = {"rtol": 0.02, "atol": 0.02} if reduce_dtype is torch.bfloat16 else {}
    for key, value in dense.items():
        total = sent[key].double().flatten() + missing[key]
        torch.testing.assert_close(
            total.float(), value.flatten(), **(close or {"rtol": 0, "atol": 1e-5})
        )


@few
def test_under_no_sync_gradients_are_added_up_and_compressed_once(
    name: str, ranks: int, strategy: Any
):
    def body(model: nn.Module, backend: Backend, accumulate: bool) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, compression=ErrorFeedback(KINDS[name]()))
        if accumulate:
            with fsdp.no_sync():
                step(fsdp, 0, backend.rank)
            assert all(p.grad is None for p in fsdp.parameters())
            step(fsdp, 7, backend.rank)
        else:
            one, two = vectors(4, seed=backend.rank), vectors(4, seed=70 + backend.rank)
            both = torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])
            (2 * loss_of(fsdp(both[0]), both[1])).backward()
        return gradient_pieces(fsdp)

    found, expected = (
        joined(on_ranks(COOPERATIVE, ranks, mlp, lambda m, b, a=accumulate: body(m, b, a)))
        for accumulate in (True, False)
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_norm_is_clipped_over_what_came():
    def run(backend: Backend) -> Any:
        fsdp = FSDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        step(fsdp, 0, backend.rank)
        before = fsdp.clip_grad_norm_(0.01)
        return before.item(), fsdp.clip_grad_norm_(1.0).item()

    (before, after), *others = simulate(run, 3)
    assert before > 0.01
    assert after == pytest.approx(0.01, rel=1e-3)
    assert list(others) == [(before, after)] * 2


@pytest.mark.parametrize("name", ["top-k", "1 bit"])
def test_training_converges_with_a_fraction_of_the_gradient(name: str):
    def run(backend: Backend) -> float:
        draw = noise(6, 3, seed=9)
        model = seeded(lambda: nn.Linear(6, 3))
        fsdp = FSDP(model, backend, compression=ErrorFeedback(KINDS[name]()))
        optimizer = torch.optim.SGD(fsdp.parameters(), 0.1)
        for number in range(40):
            x = noise(8, 6, seed=1000 * backend.rank + number)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(fsdp(x), x @ draw)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert max(simulate(run, 2)) < 0.05


# Bytes -----------------------------------------------------------------------------------------


def bytes_of_gradients(
    ranks: int, strategy: Any, compression: Compressor | None, where: Cluster = COOPERATIVE
) -> int:
    """What rank 0 sends in a second backward pass, besides all-gathers: counted twice."""

    def body(model: nn.Module, backend: Backend) -> int:
        fsdp = FSDP(model, backend, strategy=strategy, compression=compression)
        fsdp(noise(4, 100)).sum().backward()
        fsdp.zero_grad()
        loss = fsdp(noise(4, 100)).sum()
        watched, before = Watched(backend), fsdp.bytes_sent
        loss.backward()
        flags = watched.bytes_sent - (fsdp.bytes_sent - before)
        assert 0 <= flags <= 8  # which parameters were used
        return fsdp.bytes_sent - before

    build = lambda: seeded(lambda: nn.Linear(100, 100, bias=False))  # noqa: E731
    return on_ranks(where, ranks, build, body)[0]


@pytest.mark.parametrize(
    ("compression", "nbytes"),
    [
        (None, 20_000),
        (TopK(0.01), 50 * 4 + 54),  # of the other's shard: 5000 values
        (Half(), 10_000),
        (Quantized(8), 5000 + 4 * 20),
        (Quantized(1), 625 + 4 * 20),
        (PowerSGD(2), 2 * 200 * 4),
        (RandomK(0.01), 200),
    ],
    ids=str,
)
def test_a_reduce_scatter_sends_half_of_what_an_all_reduce_does(
    compression: Compressor | None, nbytes: int
):
    assert bytes_of_gradients(2, FULL_SHARD, compression) == nbytes


def test_more_ranks_send_no_more_of_the_largest_values():
    """An all-gather would send p-1 messages."""
    message = 100 * 4 + 108
    for ranks in (2, 4):
        sent = bytes_of_gradients(ranks, FULL_SHARD, TopK(0.01))
        assert sent <= message * (ranks - 1) / ranks + 2 * ranks  # indices are whole bytes


def test_hybrid_compresses_what_goes_between_groups():
    dense, compressed = (
        bytes_of_gradients(4, HYBRID, compression) for compression in (None, TopK(0.01))
    )
    assert dense == 20_000 + 20_000  # half of 40,000 inside, all-reduce of a half
    assert compressed == 20_000 + 50 * 4 + 54


# Steps that do not count -----------------------------------------------------------------------


def after(ranks: int, strategy: Any, name: str, between: Callable[[FSDP, Backend], None]) -> Any:
    """What a second pass gives, and leaves, after something in between."""

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, compression=ErrorFeedback(KINDS[name]()))
        step(fsdp, 0, backend.rank)
        fsdp.zero_grad()
        between(fsdp, backend)
        fsdp.zero_grad()
        step(fsdp, 2, backend.rank)
        return {**{n: p.grad.clone() for n, p in fsdp.named_parameters()}, **residuals_of(fsdp)}

    return on_ranks(COOPERATIVE, ranks, mlp, body)


@few
def test_a_pass_that_is_not_finite_on_one_rank_leaves_what_was_left_over(
    name: str, ranks: int, strategy: Any
):
    def infinite(fsdp: FSDP, backend: Backend) -> None:
        before = residuals_of(fsdp)
        step(fsdp, 1, backend.rank, math.nan if backend.rank == 1 else 1.0)
        assert_same_bits([before, residuals_of(fsdp)])

    found = after(ranks, strategy, name, infinite)
    expected = after(ranks, strategy, name, lambda *_: None)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits([one, other])


def test_a_gradient_scaler_skips_on_all_ranks():
    def run(backend: Backend) -> Any:
        fsdp = FSDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        optimizer = torch.optim.SGD(fsdp.parameters(), 0.1)
        scaler = GradScaler(backend, init_scale=2.0**20)
        before = fsdp.full_state_dict()
        inputs, targets = vectors(4, seed=backend.rank)
        loss = loss_of(fsdp(inputs), targets) * (math.inf if backend.rank == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_same_bits([before, fsdp.full_state_dict()])
        assert not residuals_of(fsdp)
        return scaler.get_scale()

    assert list(simulate(run, 2)) == [2.0**19] * 2


class Refusal(RuntimeError):
    """Of a test's own layer."""


@few
def test_a_backward_pass_that_fails_leaves_what_was_left_over(name: str, ranks: int, strategy: Any):
    """The same layer fails on all ranks, when some groups are on their way."""

    def failing(fsdp: FSDP, backend: Backend) -> None:
        def refuse(*_: object) -> None:
            raise Refusal

        handle = fsdp.module[0].register_full_backward_hook(refuse)
        loss = fsdp(noise(4, 6, seed=5 + backend.rank).requires_grad_()).sum()
        with pytest.raises(Refusal):
            loss.backward()
        handle.remove()

    found = after(ranks, strategy, name, failing)
    expected = after(ranks, strategy, name, lambda *_: None)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits([one, other])


# Groups and parameters that are not used -------------------------------------------------------


@few
@pytest.mark.parametrize("one_group", [False, True])
def test_what_was_left_over_of_unused_parameters_comes_later_or_is_kept(
    one_group: bool, name: str, ranks: int, strategy: Any
):
    """In a group that is used it comes on all ranks; in one that is not it waits."""

    def body(model: nn.Module, backend: Backend) -> Any:
        unit = (lambda module: module is model) if one_group else None
        fsdp = FSDP(
            *(model, backend),
            strategy=strategy,
            unit=unit,
            compression=ErrorFeedback(KINDS[name]()),
        )
        came = []
        for number in range(6):
            fsdp.zero_grad()
            fsdp(noise(4, 6, seed=backend.rank), "left" if number else "right").sum().backward()
            came.append(gradient_pieces(fsdp))
        return came, residuals_of(fsdp)

    per_rank = on_ranks(COOPERATIVE, ranks, lambda: seeded(Branches), body)
    missing = lacking([state for _, state in per_rank], SIZES)
    given = []
    for rank in range(ranks):
        plain = seeded(Branches)
        plain(noise(4, 6, seed=rank), "right").sum().backward()
        given.append(plain.right.weight.grad.double().flatten())
    came = [joined([came[n] for came, _ in per_rank])["right.weight"] for n in range(6)]
    total = sum(0 if one is None else one.double().flatten() for one in came)
    torch.testing.assert_close(
        total + missing["right.weight"], sum(given) / ranks, rtol=0, atol=1e-5
    )


def test_with_nothing_left_over_the_gradient_of_an_unused_parameter_stays_none():
    def run(backend: Backend) -> Any:
        model = seeded(Branches)
        fsdp = FSDP(model, backend, unit=lambda m: m is model, compression=EXACT["top-k"]())
        fsdp(noise(4, 6), "left").sum().backward()
        return {name for name, p in fsdp.named_parameters() if p.grad is None}

    assert list(simulate(run, 2)) == [{"right.weight", "right.bias"}] * 2


# Refusals --------------------------------------------------------------------------------------


def test_ranks_with_other_compressors_are_refused_at_construction():
    def run(backend: Backend) -> None:
        with pytest.raises(DesyncError, match=r"options of FSDP differ.*compression=.*TopK\(0.2\)"):
            FSDP(mlp(), backend, compression=ErrorFeedback(TopK(0.2 if backend.rank else 0.1)))

    simulate(run, 2)


def test_what_cannot_be_compressed_is_refused_before_the_model_is_cut():
    def run(backend: Backend) -> None:
        model = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(UnsupportedOperationError, match="not complex64"):
            FSDP(model, backend, compression=TopK(0.1))
        with pytest.raises(TypeError, match=r"FSDP\(compression=\) takes a compressor"):
            FSDP(mlp(), backend, compression=TopK)  # type: ignore[arg-type]
        assert type(model.weight) is nn.Parameter
        frozen = nn.ModuleList([nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False)])
        frozen.append(nn.Linear(6, 3))
        FSDP(frozen, backend, compression=TopK(0.1))

    simulate(run, 2)


def test_the_compressor_in_use_is_the_fsdp_s_own():
    shared = ErrorFeedback(TopK(0))

    def run(backend: Backend) -> None:
        fsdp = FSDP(mlp(), backend, compression=shared)
        step(fsdp, 0, backend.rank)
        assert fsdp.compression is not shared
        assert fsdp.compression.residual("0.weight").any()

    simulate(run, 2)
    assert shared.residual("0.weight") is None

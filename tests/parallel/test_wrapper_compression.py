"""With compression gradients are averaged in another form, and nothing is lost on the way."""

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
    gradient_pieces,
    joined,
)
from residuals import lacking
from torch import Tensor, nn
from wrappings import UNUSED, Wrapping, assert_gradients

from phalanx import (
    DDP,
    FSDP,
    Backend,
    CompressedAggregator,
    DesyncError,
    ErrorFeedback,
    GradScaler,
    MixedPrecision,
    PowerSGD,
    Quantized,
    ShardingStrategy,
    TopK,
    UnsupportedOperationError,
    clip_grad_norm_,
    simulate,
)
from phalanx.compression import Compressor, Half, RandomK

FEEDBACK: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: ErrorFeedback(TopK(0.1)),
    "random-k": lambda: ErrorFeedback(RandomK(0.2)),
    "bfloat16": lambda: ErrorFeedback(Half()),
    "float16": lambda: ErrorFeedback(Half(torch.float16)),
    "8 bits": lambda: ErrorFeedback(Quantized()),
    "1 bit": lambda: ErrorFeedback(Quantized(1, block=16)),
    "PowerSGD": lambda: ErrorFeedback(PowerSGD(1)),
}
KINDS = {
    **FEEDBACK,
    "top-k alone": lambda: TopK(0.2),
    "bfloat16 alone": Half,
    "8 bits alone": Quantized,
}
EXACT: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: ErrorFeedback(TopK(1)),
    "random-k": lambda: RandomK(1),
    "PowerSGD": lambda: PowerSGD(99),
    "PowerSGD, error feedback": lambda: ErrorFeedback(PowerSGD(99)),
}
SIZES = {
    name: p.numel() for model in (mlp(), seeded(Branches)) for name, p in model.named_parameters()
}
HYBRID = ShardingStrategy.hybrid(2)


def ddp(bucket_size: int, **options: Any) -> Wrapping:
    return Wrapping(DDP, {"bucket_size": bucket_size, **options}, COOPERATIVE)


def fsdp(strategy: ShardingStrategy, cluster: Cluster = COOPERATIVE) -> Wrapping:
    return Wrapping(FSDP, {"strategy": strategy}, cluster)


SHARDED = [  # and on how many ranks
    (1, fsdp(FULL_SHARD)),
    (2, fsdp(FULL_SHARD)),
    (3, fsdp(FULL_SHARD, MESSAGES)),
    (4, fsdp(FULL_SHARD)),
    (2, fsdp(SHARD_GRAD_OP)),
    (3, fsdp(NO_SHARD)),
    (4, fsdp(HYBRID)),
    (4, fsdp(HYBRID, MESSAGES)),
    (2, fsdp(HYBRID, COMMON)),  # which is FULL_SHARD
]
FEW_SHARDED = [
    ("top-k", 2, fsdp(FULL_SHARD)),
    ("PowerSGD", 2, fsdp(NO_SHARD)),
    ("1 bit", 4, fsdp(HYBRID)),
]  # of one round, of two, with something left over of means, too


def cases(*rows: Any) -> pytest.MarkDecorator:
    """A test that takes `name`, of a compressor, `ranks` and `wrap` is run with each of these."""
    return pytest.mark.parametrize(("name", "ranks", "wrap"), rows, ids=str)


few = cases(*((name, 2, ddp(200)) for name in FEEDBACK), *FEW_SHARDED)
both = pytest.mark.parametrize("kind", [DDP, FSDP])


def step(model: nn.Module, number: int, rank: int, scale: float = 1.0) -> None:
    inputs, targets = vectors(4, seed=10 * number + rank)
    (loss_of(model(inputs), targets) * scale).backward()


def own_gradient(number: int, rank: int) -> Gradients:
    plain = mlp()
    step(plain, number, rank)
    return gradients(plain)


def residuals_of(model: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.own_state().items()}


def train(wrap: Wrapping, ranks: int, compression: Compressor | None, steps: int = 3) -> list[Any]:
    """The whole model afterwards, on every rank."""

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap.kind(model, backend, compression=compression, **wrap.options)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
        for number in range(steps):
            optimizer.zero_grad()
            step(wrapped, number, backend.rank)
            optimizer.step()
        return wrap.state(wrapped)

    return wrap.on_ranks(ranks, mlp, body)


# What it computes ------------------------------------------------------------------------------


@cases(
    *((name, 3, ddp(size)) for name in ("top-k", "PowerSGD") for size in (1, 200, 1 << 20)),
    ("PowerSGD, error feedback", 3, ddp(200)),
    *(("PowerSGD", *one) for one in SHARDED),
    ("top-k", *SHARDED[2]),
    ("random-k", *SHARDED[1]),
)
def test_what_leaves_nothing_out_trains_like_what_does_not_compress(
    name: str, ranks: int, wrap: Wrapping
):
    found = train(wrap, ranks, EXACT[name]())
    assert_same_bits(found)
    assert_close(found[0], train(wrap, ranks, None)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_stay_the_same_bits(name: str):
    assert_same_bits(train(ddp(200), 3, KINDS[name]()))


@cases(
    *((name, 3, ddp(size)) for name in FEEDBACK for size in (1, 200)),
    *((name, 3, fsdp(FULL_SHARD)) for name in FEEDBACK),
    *((name, 4, fsdp(HYBRID)) for name in FEEDBACK),
    *(("PowerSGD", *one) for one in SHARDED if one[0] < 4),
)
def test_gradients_that_came_and_what_is_left_over_are_all_that_there_were(
    name: str, ranks: int, wrap: Wrapping
):
    """Over three passes, after the first of which DDP has buckets in another order; bit-identical
    where several ranks have the same elements.
    """

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap.kind(model, backend, compression=FEEDBACK[name](), **wrap.options)
        came = []
        for number in range(3):
            wrapped.zero_grad()
            step(wrapped, number, backend.rank)
            came.append(gradient_pieces(wrapped))
        return came, residuals_of(wrapped)

    per_rank = wrap.on_ranks(ranks, mlp, body)
    missing = lacking([state for _, state in per_rank], SIZES)
    passes = [joined([came[number] for came, _ in per_rank]) for number in range(3)]
    given = [own_gradient(n, r) for n in range(3) for r in range(ranks)]
    for key in passes[0]:
        total = sum(one[key].double() for one in passes).flatten() + missing[key]
        expected = sum(one[key].double() for one in given).flatten() / ranks
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD], ids=str)
def test_where_matrices_stay_whole_power_sgd_is_that_of_ddp(strategy: Any):
    found, expected = (
        train(wrap, 3, ErrorFeedback(PowerSGD(1)))[0] for wrap in (fsdp(strategy), ddp(1 << 20))
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_one_rank_computes_what_a_ddp_of_one_does():
    def run(kind: Any, backend: Backend) -> Any:
        model = kind(mlp(), backend, compression=ErrorFeedback(PowerSGD(1)))
        for number in range(2):
            model.zero_grad()
            step(model, number, 0)
        return {n: g.flatten() for n, g in gradients(model).items()}

    found, expected = (simulate(lambda b, k=kind: run(k, b), 1)[0] for kind in (FSDP, DDP))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.checkered
@both
def test_it_works_on_every_kind_of_backend(kind: Any, cluster: Cluster):
    def one(model: Any, rank: int) -> None:
        step(model, 0, rank)

    wrap = Wrapping(kind, {}, cluster)
    given = {"compression": ErrorFeedback(TopK(1))}
    (found,) = wrap.gradients(3, mlp, one, ddp=given, fsdp=given)
    assert_gradients(found, 3, mlp, one, rtol=1e-5, atol=1e-6)
    given = {"compression": FEEDBACK["1 bit"]()}  # of two rounds
    wrap.gradients(3, mlp, one, one, ddp={**given, "bucket_size": 200}, fsdp=given)


@pytest.mark.checkered
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@cases(*FEW_SHARDED)
def test_in_mixed_precision_nothing_is_lost_either(
    name: str, ranks: int, wrap: Wrapping, reduce_dtype: torch.dtype
):
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=reduce_dtype)

    def body(model: nn.Module, backend: Backend, compression: Any) -> Any:
        options = {"mixed_precision": precision, "compression": compression}
        wrapped = wrap(model, backend, fsdp=options)
        wrapped(vectors(4, seed=backend.rank)[0]).float().pow(2).sum().backward()
        return gradient_pieces(wrapped), residuals_of(wrapped)

    def run(compression: Any) -> Any:
        found = wrap.on_ranks(ranks, mlp, lambda m, b: body(m, b, compression))
        missing = lacking([state for _, state in found], SIZES)
        return joined([pieces for pieces, _ in found]), missing

    dense, _ = run(None)
    sent, missing = run(FEEDBACK[name]())
    close = {"rtol": 0.02, "atol": 0.02} if reduce_dtype is torch.bfloat16 else {}
    for key, value in dense.items():
        total = sent[key].double().flatten() + missing[key]
        torch.testing.assert_close(
            total.float(), value.flatten(), **(close or {"rtol": 0, "atol": 1e-5})
        )


@pytest.mark.parametrize(
    ("kind", "name"), [*((DDP, name) for name in FEEDBACK), (FSDP, "top-k"), (FSDP, "1 bit")]
)
def test_training_converges_with_a_fraction_of_the_gradient(kind: Any, name: str):
    def run(backend: Backend) -> float:
        draw = noise(6, 3, seed=9)
        wrapped = kind(seeded(lambda: nn.Linear(6, 3)), backend, compression=FEEDBACK[name]())
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        for number in range(40):
            x = noise(8, 6, seed=1000 * backend.rank + number)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), x @ draw)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert max(simulate(run, 2)) < 0.05


# Bytes -----------------------------------------------------------------------------------------


def bytes_of_gradients(ranks: int, wrap: Wrapping, compression: Compressor | None) -> int:
    """What rank 0 sends in a second backward pass, besides all-gathers: counted twice."""

    def body(model: nn.Module, backend: Backend) -> int:
        given = {"compression": compression}
        wrapped = wrap(model, backend, ddp=given, fsdp=given)
        wrapped(noise(4, 100)).sum().backward()
        wrapped.zero_grad()
        loss = wrapped(noise(4, 100)).sum()
        watched, before = Watched(backend), wrapped.bytes_sent
        loss.backward()
        flags = watched.bytes_sent - (wrapped.bytes_sent - before)
        assert 0 <= flags <= (8 if wrap.kind is FSDP else 0)  # which parameters were used
        return wrapped.bytes_sent - before

    return wrap.on_ranks(ranks, lambda: seeded(lambda: nn.Linear(100, 100, bias=False)), body)[0]


@pytest.mark.parametrize(
    ("compression", "all_reduce", "reduce_scatter"),
    [
        (None, 40_000, 20_000),  # 2(p-1)/p of them, and half of that
        (TopK(0.01), 100 * 4 + 107, 50 * 4 + 54),  # of the other's shard: 5000 values
        (Half(), 20_000, 10_000),
        (Quantized(8), 10_000 + 4 * 40, 5000 + 4 * 20),  # halves of it twice, in blocks of 256
        (Quantized(1), 1250 + 4 * 40, 625 + 4 * 20),
        (PowerSGD(2), 2 * 200 * 4, 2 * 200 * 4),
        (RandomK(0.01), 400, 200),
    ],
    ids=str,
)
def test_fewer_bytes_are_sent_and_a_reduce_scatter_sends_half_of_what_an_all_reduce_does(
    compression: Compressor | None, all_reduce: int, reduce_scatter: int
):
    assert bytes_of_gradients(2, ddp(25 << 20), compression) == all_reduce
    assert bytes_of_gradients(2, fsdp(FULL_SHARD), compression) == reduce_scatter


def test_more_ranks_send_no_more_of_the_largest_values():
    """An all-gather would send p-1 messages."""
    message = 100 * 4 + 108
    for ranks in (2, 4):
        sent = bytes_of_gradients(ranks, fsdp(FULL_SHARD), TopK(0.01))
        assert sent <= message * (ranks - 1) / ranks + 2 * ranks  # indices are whole bytes


def test_hybrid_compresses_what_goes_between_groups():
    dense, compressed = (
        bytes_of_gradients(4, fsdp(HYBRID), compression) for compression in (None, TopK(0.01))
    )
    assert dense == 20_000 + 20_000  # half of 40,000 inside, all-reduce of a half
    assert compressed == 20_000 + 50 * 4 + 54


# Together with everything else -----------------------------------------------------------------


@cases(*((name, 2, ddp(25 << 20)) for name in KINDS), *FEW_SHARDED)
def test_under_no_sync_gradients_are_added_up_and_compressed_once(
    name: str, ranks: int, wrap: Wrapping
):
    def accumulated(model: Any, rank: int) -> None:
        with model.no_sync():
            step(model, 0, rank)
        if wrap.kind is FSDP:
            assert all(p.grad is None for p in model.parameters())
        step(model, 7, rank)

    def at_once(model: Any, rank: int) -> None:
        one, two = vectors(4, seed=rank), vectors(4, seed=70 + rank)
        joined_batch = torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])
        (2 * loss_of(model(joined_batch[0]), joined_batch[1])).backward()

    found, expected = (
        wrap.gradients(ranks, mlp, one, ddp=given, fsdp=given)[0]
        for one, given in ((p, {"compression": KINDS[name]()}) for p in (accumulated, at_once))
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_norm_is_clipped_over_what_came():
    def run(backend: Backend) -> Any:
        fsdp = FSDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        step(fsdp, 0, backend.rank)
        before = clip_grad_norm_(fsdp, 0.01)
        return before.item(), clip_grad_norm_(fsdp, 1.0).item()

    (before, after), *others = simulate(run, 3)
    assert before > 0.01
    assert after == pytest.approx(0.01, rel=1e-3)
    assert list(others) == [(before, after)] * 2


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_without_a_batch_sends_what_it_has_left_over(name: str):
    def run(backend: Backend):
        ddp = DDP(mlp(), backend, compression=KINDS[name]())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        with ddp.join(update):
            for number in range(2 + backend.rank):
                step(ddp, number, backend.rank)
                update()
        return values(ddp.module)

    assert_same_bits(list(simulate(run, 3)))


def test_batches_of_different_sizes_are_weighted():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend, compression=EXACT["top-k"]())
        share = slice(0, 2) if backend.rank == 0 else slice(2, 7)
        inputs, targets = (one[share] for one in vectors(7))
        ddp.weighted(loss_of(ddp(inputs), targets), len(inputs)).backward()
        return gradients(ddp)

    whole = mlp()
    inputs, targets = vectors(7)
    loss_of(whole(inputs), targets).backward()
    assert_close(simulate(run, 2)[0], gradients(whole), rtol=1e-4, atol=1e-6)


# Steps that do not count -----------------------------------------------------------------------


def after(ranks: int, wrap: Wrapping, name: str, between: Callable[[Any, Backend], None]) -> Any:
    """What a second pass gives, and leaves, after something in between."""

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap.kind(model, backend, compression=FEEDBACK[name](), **wrap.options)
        step(wrapped, 0, backend.rank)
        wrapped.zero_grad()
        between(wrapped, backend)
        wrapped.zero_grad()
        step(wrapped, 2, backend.rank)
        given = {n: p.grad.clone() for n, p in wrapped.named_parameters()}
        return {**given, **residuals_of(wrapped)}

    return wrap.on_ranks(ranks, mlp, body)


def assert_leaves_no_trace(
    ranks: int, wrap: Wrapping, name: str, between: Callable[[Any, Backend], None]
) -> None:
    found, expected = (after(ranks, wrap, name, act) for act in (between, lambda *_: None))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits([one, other])


@cases(
    *((name, 2, ddp(200)) for name in FEEDBACK),
    *((name, 2, ddp(200, skip_nonfinite=True)) for name in FEEDBACK),
    *FEW_SHARDED,
)
def test_a_pass_that_is_not_finite_on_one_rank_leaves_what_was_left_over(
    name: str, ranks: int, wrap: Wrapping
):
    """Whether DDP skips the step, or a gradient scaler."""
    value = math.inf if wrap.options.get("skip_nonfinite") else math.nan

    def infinite(wrapped: Any, backend: Backend) -> None:
        before = residuals_of(wrapped)
        step(wrapped, 1, backend.rank, value if backend.rank == 1 else 1.0)
        assert_same_bits([before, residuals_of(wrapped)])
        if wrap.options.get("skip_nonfinite"):
            assert wrapped.skipped_steps == 1
        elif wrap.kind is DDP:
            assert not all(g.isfinite().all() for g in gradients(wrapped).values())

    assert_leaves_no_trace(ranks, wrap, name, infinite)


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


@cases(*((name, 2, ddp(1)) for name in FEEDBACK), *FEW_SHARDED)
def test_a_backward_pass_that_fails_leaves_what_was_left_over(
    name: str, ranks: int, wrap: Wrapping
):
    """The same layer fails on all ranks, when some buckets or groups are on their way."""

    def failing(wrapped: Any, backend: Backend) -> None:
        def refuse(*_: object) -> None:
            raise Refusal

        handle = wrapped.module[0].register_full_backward_hook(refuse)
        loss = wrapped(noise(4, 6, seed=5 + backend.rank).requires_grad_()).sum()
        with pytest.raises(Refusal):
            loss.backward()
        handle.remove()

    assert_leaves_no_trace(ranks, wrap, name, failing)


# Parameters that are not used ------------------------------------------------------------------


@pytest.mark.checkered
@few
@pytest.mark.parametrize("one_group", [False, True])
def test_what_was_left_over_of_unused_parameters_comes_later_or_is_kept(
    one_group: bool, name: str, ranks: int, wrap: Wrapping
):
    """In a bucket, or a group that is used, it comes on all ranks; in one that is not it waits."""
    if one_group and wrap.kind is DDP:
        wrap = ddp(25 << 20)
    options: dict[str, Any] = {"compression": FEEDBACK[name]()}
    unit = (lambda module: isinstance(module, Branches)) if one_group else None

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend, ddp={**UNUSED, **options}, fsdp={"unit": unit, **options})
        came = []
        for number in range(12 if wrap.kind is DDP else 6):
            wrapped.zero_grad()
            used = "left" if number else "right"
            wrapped(noise(4, 6, seed=backend.rank), used).sum().backward()
            came.append(gradient_pieces(wrapped))
        return came, residuals_of(wrapped)

    per_rank = wrap.on_ranks(ranks, lambda: seeded(Branches), body)
    missing = lacking([state for _, state in per_rank], SIZES)
    given = []
    for rank in range(ranks):
        plain = seeded(Branches)
        plain(noise(4, 6, seed=rank), "right").sum().backward()
        given.append(plain.right.weight.grad.double().flatten())
    passes = zip(*(came for came, _ in per_rank), strict=True)
    came = [joined(list(pieces))["right.weight"] for pieces in passes]
    total = sum(0 if one is None else one.double().flatten() for one in came)
    torch.testing.assert_close(
        total + missing["right.weight"], sum(given) / ranks, rtol=0, atol=1e-5
    )


@both
def test_with_nothing_left_over_the_gradient_of_an_unused_parameter_stays_none(kind: Any):
    def run(backend: Backend) -> Any:
        model = seeded(Branches)
        options = UNUSED if kind is DDP else {"unit": lambda module: module is model}
        wrapped = kind(model, backend, compression=EXACT["top-k"](), **options)
        wrapped(noise(4, 6), "left").sum().backward()
        return {name for name, p in wrapped.named_parameters() if p.grad is None}

    assert list(simulate(run, 2)) == [{"right.weight", "right.bias"}] * 2


# Refusals --------------------------------------------------------------------------------------


@both
def test_ranks_with_other_compressors_are_refused_at_construction(kind: Any):
    said = rf"options of {kind.__name__} differ.*compression=ErrorFeedback\(TopK\(0.2\)\)"

    def run(backend: Backend) -> None:
        with pytest.raises(DesyncError, match=said):
            kind(mlp(), backend, compression=ErrorFeedback(TopK(0.2 if backend.rank else 0.1)))

    simulate(run, 2)


@pytest.mark.parametrize(("kind", "says"), [(DDP, "rank 0: DDP: weight: TopK.*"), (FSDP, "")])
def test_what_cannot_be_compressed_is_refused_before_anything_is_changed(kind: Any, says: str):
    def run(backend: Backend) -> None:
        model = nn.Linear(2, 2, dtype=torch.complex64)
        with pytest.raises(UnsupportedOperationError, match=f"{says}not complex64"):
            kind(model, backend, compression=TopK(0.1))
        assert type(model.weight) is nn.Parameter
        frozen = nn.ModuleList([nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False)])
        frozen.append(nn.Linear(6, 3))
        kind(frozen, backend, compression=TopK(0.1))

    simulate(run, 1)


@both
def test_the_compressor_in_use_is_the_wrapper_s_own(kind: Any):
    shared = ErrorFeedback(TopK(0))

    def run(backend: Backend) -> None:
        wrapped = kind(mlp(), backend, compression=shared)
        step(wrapped, 0, backend.rank)
        assert wrapped.compression is not shared
        assert wrapped.compression.residual("0.weight").any()

    simulate(run, 2)
    assert shared.residual("0.weight") is None
    assert kind.__init__.__kwdefaults__["compression"] is None


@pytest.mark.parametrize("none", [TopK, "top_k", 0.01])
def test_what_is_no_compressor_is_refused_before_anything_is_sent(none: Any):
    def run(backend: Backend) -> None:
        for refuses, who in (
            (lambda: DDP(mlp(), backend, compression=none), r"DDP\(compression=\)"),
            (lambda: FSDP(mlp(), backend, compression=none), r"FSDP\(compression=\)"),
            (lambda: CompressedAggregator(backend, none), ""),
            (lambda: ErrorFeedback(none), ""),
        ):
            with pytest.raises(TypeError, match=rf"{who} takes a compressor, such as TopK\(0.01\)"):
                refuses()

    simulate(run, 1)

"""DDP with compression: buckets are averaged in another form, and nothing is lost on the way."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from clusters import Cluster
from ddp_models import Branches, loss_of, mlp, noise, seeded, vectors
from ddp_runs import Watched, assert_close, assert_same_bits, gradients, values
from torch import nn

from phalanx import (
    DDP,
    Backend,
    CompressedAggregator,
    DesyncError,
    ErrorFeedback,
    PowerSGD,
    Quantized,
    SizeMismatchError,
    TopK,
    UnsupportedOperationError,
    simulate,
)
from phalanx.compression import Half, RandomK
from phalanx.compression.error_feedback import total_residual

KINDS = {
    "top-k": lambda: TopK(0.2),
    "top-k, error feedback": lambda: ErrorFeedback(TopK(0.2)),
    "random-k, error feedback": lambda: ErrorFeedback(RandomK(0.2)),
    "bfloat16": Half,
    "8 bits": Quantized,
    "1 bit, error feedback": lambda: ErrorFeedback(Quantized(1, block=16)),
    "float16, error feedback": lambda: ErrorFeedback(Half(torch.float16)),
    "PowerSGD, error feedback": lambda: ErrorFeedback(PowerSGD(1)),
}
EXACT = {"top-k": lambda: ErrorFeedback(TopK(1)), "PowerSGD": lambda: ErrorFeedback(PowerSGD(99))}
FEEDBACK = [name for name in KINDS if "feedback" in name]


def step(ddp: DDP, seed: int, scale: float = 1.0) -> None:
    inputs, targets = vectors(4, seed=seed)
    (loss_of(ddp(inputs), targets) * scale).backward()


def lacks(states: list[dict], size: int) -> dict[str, torch.Tensor]:
    """What averages are short of, by parameter, from all ranks' own states."""
    cut = [{key.split(".", 1)[1]: value for key, value in state.items()} for state in states]
    return total_residual(cut, size)


@pytest.mark.parametrize("bucket_size", [1, 200, 1 << 20])
@pytest.mark.parametrize("name", EXACT)
def test_what_leaves_nothing_out_trains_like_plain_ddp(name: str, bucket_size: int):
    def run(backend: Backend, compression):
        ddp = DDP(mlp(), backend, bucket_size=bucket_size, compression=compression)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        for number in range(3):
            optimizer.zero_grad()
            step(ddp, 10 * number + backend.rank)
            optimizer.step()
        return values(ddp.module)

    plain = simulate(lambda b: run(b, None), 3)[0]
    found = simulate(lambda b: run(b, EXACT[name]()), 3)
    assert_same_bits(list(found))
    assert_close(found[0], plain)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_stay_the_same_bits(name: str):
    def run(backend: Backend):
        ddp = DDP(mlp(), backend, bucket_size=200, compression=KINDS[name]())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for number in range(3):
            optimizer.zero_grad()
            step(ddp, 10 * number + backend.rank)
            optimizer.step()
        return values(ddp.module)

    assert_same_bits(list(simulate(run, 3)))


def test_it_works_on_every_kind_of_backend(cluster: Cluster):
    name = "1 bit, error feedback"  # of two rounds
    models = [mlp() for _ in range(3)]

    def run(backend: Backend):
        ddp = DDP(models[backend.rank], backend, bucket_size=200, compression=KINDS[name]())
        for number in range(2):
            ddp.zero_grad()
            step(ddp, 10 * number + backend.rank)
        return gradients(ddp)

    assert_same_bits(cluster.run(run, 3))


@pytest.mark.parametrize("bucket_size", [1, 200])
@pytest.mark.parametrize("name", FEEDBACK)
def test_gradients_that_came_and_what_is_left_over_are_all_that_there_were(
    name: str, bucket_size: int
):
    """Over three passes, the first of which ends with buckets in another order."""

    def run(backend: Backend):
        ddp = DDP(mlp(), backend, bucket_size=bucket_size, compression=KINDS[name]())
        came, given = {}, {}
        for number in range(3):
            alone = mlp()
            inputs, targets = vectors(4, seed=10 * number + backend.rank)
            loss_of(alone(inputs), targets).backward()
            ddp.zero_grad()
            step(ddp, 10 * number + backend.rank)
            for total, part in ((came, gradients(ddp)), (given, gradients(alone))):
                for key, value in part.items():
                    total[key] = total.get(key, 0) + value.double()
        return came, given, ddp.own_state()

    came, given, states = zip(*simulate(run, 3), strict=True)
    missing = lacks(list(states), 3)
    for key in came[0]:
        mean = sum(one[key] for one in given) / 3
        total = came[0][key].flatten() + missing[key]
        torch.testing.assert_close(total, mean.flatten(), rtol=0, atol=1e-6)


def test_fewer_bytes_are_sent_and_as_many_as_messages_say():
    def run(backend: Backend, compression) -> int:
        model = seeded(lambda: nn.Linear(100, 100, bias=False))
        ddp = DDP(model, backend, compression=compression)
        ddp(noise(4, 100)).sum().backward()
        ddp.zero_grad()
        watched, before = Watched(backend), ddp.bytes_sent
        ddp(noise(4, 100)).sum().backward()
        assert ddp.bytes_sent - before == watched.bytes_sent
        return watched.bytes_sent

    dense = simulate(lambda b: run(b, None), 2)[0]
    assert dense == 40_000  # 2(p-1)/p of them
    for compression, nbytes in [
        (TopK(0.01), 100 * 4 + 107),
        (Half(), 20_000),
        (Quantized(8), 10_000 + 4 * 40),  # halves of it twice, in blocks of 256
        (Quantized(1), 1250 + 4 * 40),
        (PowerSGD(2), 2 * 200 * 4),
        (RandomK(0.01), 400),
    ]:
        assert simulate(lambda b, c=compression: run(b, c), 2)[0] == nbytes


@pytest.mark.parametrize("name", FEEDBACK)
def test_training_converges_with_a_fraction_of_the_gradient(name: str):
    def run(backend: Backend, compression) -> float:
        draw = noise(6, 3, seed=9)
        model = seeded(lambda: nn.Linear(6, 3))
        ddp = DDP(model, backend, compression=compression)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for number in range(40):
            x = noise(8, 6, seed=1000 * backend.rank + number)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), x @ draw)
            loss.backward()
            optimizer.step()
        return loss.item()

    start, end = 1.0, max(simulate(lambda b: run(b, KINDS[name]()), 2))
    assert end < 0.05 * start


# Together with everything else -----------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_under_no_sync_gradients_are_added_up_and_compressed_once(name: str):
    def run(backend: Backend, accumulate: bool):
        ddp = DDP(mlp(), backend, compression=KINDS[name]())
        if accumulate:
            with ddp.no_sync():
                step(ddp, backend.rank)
            step(ddp, 7 + backend.rank)
        else:
            one, two = vectors(4, seed=backend.rank), vectors(4, seed=7 + backend.rank)
            (loss_of(ddp(one[0]), one[1]) + loss_of(ddp.module(two[0]), two[1])).backward()
        return gradients(ddp)

    both = [simulate(lambda b, a=accumulate: run(b, a), 2)[0] for accumulate in (True, False)]
    assert_close(*both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_parameter_nobody_uses_any_more_gets_what_was_left_over_of_it(name: str):
    def run(backend: Backend):
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True, compression=KINDS[name]())
        came = 0
        alone = seeded(Branches)
        alone(noise(4, 6, seed=backend.rank), "right").sum().backward()
        for number in range(12):
            ddp.zero_grad()
            used = "right" if number == 0 else "left"
            ddp(noise(4, 6, seed=backend.rank), used).sum().backward()
            grad = ddp.module.right.weight.grad
            came = came + (0 if grad is None else grad.double())
        return came.flatten(), alone.right.weight.grad.double().flatten(), ddp.own_state()

    came, given, states = zip(*simulate(run, 2), strict=True)
    missing = lacks(list(states), 2)["right.weight"]
    torch.testing.assert_close(came[0] + missing, sum(given) / 2, rtol=0, atol=1e-6)


def test_without_anything_left_over_the_gradient_of_an_unused_parameter_stays_none():
    def run(backend: Backend):
        ddp = DDP(
            seeded(Branches), backend, find_unused_parameters=True, compression=EXACT["top-k"]()
        )
        ddp(noise(4, 6), "left").sum().backward()
        return {name for name, grad in gradients(ddp).items() if grad is None}

    assert list(simulate(run, 2)) == [{"right.weight", "right.bias"}] * 2


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_step_that_is_skipped_leaves_what_was_left_over_as_it_was(name: str):
    def run(backend: Backend, bad: bool):
        ddp = DDP(mlp(), backend, bucket_size=200, skip_nonfinite=True, compression=KINDS[name]())
        step(ddp, backend.rank)
        if bad:
            ddp.zero_grad()
            step(ddp, 5 + backend.rank, math.inf if backend.rank == 1 else 1.0)
            assert ddp.skipped_steps == 1
        ddp.zero_grad()
        step(ddp, 9 + backend.rank)
        return {**gradients(ddp), **ddp.own_state()}

    for with_bad, without in zip(
        simulate(lambda b: run(b, True), 2), simulate(lambda b: run(b, False), 2), strict=True
    ):
        assert_same_bits([with_bad, without])


@pytest.mark.parametrize("name", FEEDBACK)
def test_so_does_one_that_a_gradient_scaler_skips(name: str):
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, bucket_size=200, compression=KINDS[name]())
        step(ddp, backend.rank)
        before = ddp.own_state()
        step(ddp, 5, math.nan if backend.rank == 0 else 1.0)
        assert not all(g.isfinite().all() for g in gradients(ddp).values())
        assert_same_bits([before, ddp.own_state()])

    simulate(run, 2)


class Refusal(RuntimeError):
    """Of a test's own layer."""


@pytest.mark.parametrize("name", FEEDBACK)
def test_so_does_a_backward_pass_that_fails(name: str):
    """The same layer fails on both ranks, when some buckets have been averaged already."""

    def run(backend: Backend, fails: bool):
        ddp = DDP(mlp(), backend, bucket_size=1, compression=KINDS[name]())
        step(ddp, backend.rank)
        if fails:
            ddp.zero_grad()
            handle = ddp.module[0].weight.register_hook(refuse)
            with pytest.raises(Refusal):
                step(ddp, 5 + backend.rank)
            handle.remove()
        ddp.zero_grad()
        step(ddp, 9 + backend.rank)
        return {**gradients(ddp), **ddp.own_state()}

    def refuse(grad: torch.Tensor) -> None:
        raise Refusal

    for with_failure, without in zip(
        simulate(lambda b: run(b, True), 2), simulate(lambda b: run(b, False), 2), strict=True
    ):
        assert_same_bits([with_failure, without])


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
                step(ddp, 10 * number + backend.rank)
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


# State -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nested"), [*((name, False) for name in KINDS), ("1 bit, error feedback", True)]
)
def test_training_goes_on_bit_for_bit_from_a_state_dict(name: str, nested: bool):
    def train(backend: Backend, steps: range, state):
        ddp = DDP(mlp(), backend, bucket_size=200, compression=KINDS[name]())
        holder = nn.ModuleDict({"net": ddp}) if nested else ddp
        if state is not None:
            holder.load_state_dict(state)
        for number in steps:
            ddp.zero_grad()
            step(ddp, 10 * number + backend.rank)
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        # Copies: tensors of a state dict are the model's own.
        return {key: value.clone() for key, value in holder.state_dict().items()}

    half = simulate(lambda b: train(b, range(2), None), 2)
    again = simulate(lambda b: train(b, range(0), half[b.rank]), 2)
    for one, other in zip(half, again, strict=True):
        assert_same_bits([dict(sorted(one.items())), dict(sorted(other.items()))])
    whole = simulate(lambda b: train(b, range(4), None), 2)
    rest = simulate(lambda b: train(b, range(2, 4), half[b.rank]), 2)
    for one, other in zip(whole, rest, strict=True):
        assert_same_bits([dict(sorted(one.items())), dict(sorted(other.items()))])


@pytest.mark.parametrize(("p", "q"), [(3, 2), (2, 3)])
@pytest.mark.parametrize("name", FEEDBACK)
def test_another_number_of_ranks_loads_what_all_have_saved(name: str, p: int, q: int):
    def save(backend: Backend):
        ddp = DDP(mlp(), backend, bucket_size=200, compression=KINDS[name]())
        for number in range(2):
            ddp.zero_grad()
            step(ddp, 10 * number + backend.rank)
        return ddp.state_dict()

    saved = simulate(save, p)
    joined = {key: value for state in saved for key, value in state.items()}
    own = [{k: v for k, v in state.items() if k.startswith("compression@")} for state in saved]

    def load(backend: Backend):
        ddp = DDP(mlp(1), backend, compression=KINDS[name]())
        ddp.load_state_dict(joined)
        assert_same_bits([values(ddp.module), {k: joined[k] for k in values(ddp.module)}])
        loaded = ddp.own_state()
        step(ddp, backend.rank)
        return loaded

    before, after = lacks(own, p), lacks(list(simulate(load, q)), q)
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=2**-24, atol=0)


def test_a_plain_module_loads_the_module_s_state_or_what_it_knows_of_ddp_s():
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        step(ddp, 0)
        mlp().load_state_dict(ddp.module.state_dict())
        mlp().load_state_dict(ddp.state_dict(), strict=False)
        with pytest.raises(RuntimeError, match=r"Unexpected.*compression@0/1.residual"):
            mlp().load_state_dict(ddp.state_dict())
        fresh = DDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        fresh.load_state_dict(mlp(1).state_dict())  # which has nothing left over
        assert_same_bits([values(fresh.module), values(mlp(1))])

    simulate(run, 1)


def test_who_does_not_compress_any_more_is_told_that_something_is_lost(caplog):
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        step(ddp, 0)
        state = ddp.state_dict()
        del ddp
        DDP(mlp(1), backend).load_state_dict(state)

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        simulate(run, 1)
    assert ["there is no compression now" in record.getMessage() for record in caplog.records] == [
        True
    ]


# Refusals --------------------------------------------------------------------------------------


def test_ranks_with_other_compressors_are_refused_at_construction():
    def run(backend: Backend) -> None:
        with pytest.raises(DesyncError, match=r"compression=ErrorFeedback\(TopK\(0.2\)\)"):
            DDP(mlp(), backend, compression=ErrorFeedback(TopK(0.2 if backend.rank else 0.1)))

    simulate(run, 2)


def test_parameters_that_cannot_be_compressed_are_refused_at_construction():
    def run(backend: Backend) -> None:
        with pytest.raises(
            UnsupportedOperationError, match=r"rank 0: DDP: weight: TopK.*not complex64"
        ):
            DDP(nn.Linear(2, 2, dtype=torch.complex64), backend, compression=TopK(0.1))

    simulate(run, 1)


def test_the_compressor_in_use_is_the_ddp_s_own():
    shared = ErrorFeedback(TopK(0))

    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, compression=shared)
        step(ddp, 0)
        assert ddp.compression is not shared
        assert ddp.compression.residual("0.weight").any()

    simulate(run, 2)
    assert shared.residual("0.weight") is None
    assert DDP.__init__.__kwdefaults__["compression"] is None


def test_the_state_of_another_model_is_refused_by_the_parameter_s_name():
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, compression=ErrorFeedback(TopK(0.1)))
        for name, words in (("0.weight", "48 values"), ("9.weight", "no such gradient")):
            with pytest.raises(SizeMismatchError, match=f"over of {name}, and .* has {words}"):
                ddp.load_own_state({f"compression@0/1.residual.{name}": torch.zeros(5)})

    simulate(run, 1)


@pytest.mark.parametrize("none", [TopK, "top_k", 0.01])
def test_what_is_no_compressor_is_refused_before_anything_is_sent(none):
    def run(backend: Backend) -> None:
        for refuses in (
            lambda: DDP(mlp(), backend, compression=none),
            lambda: CompressedAggregator(backend, none),
            lambda: ErrorFeedback(none),
        ):
            with pytest.raises(TypeError, match=r"takes a compressor, such as TopK\(0.01\)"):
                refuses()

    simulate(run, 1)

"""`LocalSGD.step`, `DiLoCo.step`: ranks count in a sync by what they have seen since the last."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from clusters import Cluster
from ddp_models import mlp
from ddp_runs import Watched, assert_close, assert_same_bits, outcome_of
from forms import sizes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from local_parts import (
    EVERY,
    EXACT,
    KINDS,
    OneProcess,
    Step,
    assert_near,
    build,
    losses,
    take,
    weight_of,
)
from local_runs import Values, adamw, sgd, take_step, values

from phalanx import (
    Backend,
    DesyncError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    MisuseError,
    PowerSGD,
    Quantized,
    TopK,
    load_checkpoint,
    save_checkpoint,
    simulate,
)
from phalanx.compression import Compressor
from phalanx.compression.error_feedback import total_residual

steps_of_a_rank = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=3), max_size=3)
plans = st.integers(1, 5).flatmap(
    lambda steps: st.lists(
        st.lists(steps_of_a_rank, min_size=steps, max_size=steps), min_size=1, max_size=4
    )
)


@settings(max_examples=sizes(15, 200))
@given(kind=st.sampled_from(sorted(KINDS)), plan=plans)
def test_ranks_are_as_one_process_that_weights_them_by_what_they_have_seen(
    kind: str, plan: list[list[Step]]
):
    """Any micro-batches of any weight, in all ranks' steps; NaN as the loss of weight 0."""
    count = len(plan[0])
    periods = [range(at, min(at + EVERY, count)) for at in range(0, count, EVERY)]
    for period in periods:
        assume(sum(weight_of(steps[n]) for steps in plan for n in period))

    def run(backend: Backend):
        model = KINDS[kind](build(), backend)
        optimizer = sgd(model.parameters())
        seen = []
        for number, step in enumerate(plan[backend.rank]):
            seen.append(take(model, optimizer, backend.rank, number, step))
        model.sync()
        return values(model), seen

    one = OneProcess(kind, len(plan))
    expected: list[list[float]] = [[] for _ in plan]
    for period in periods:
        for number in period:
            for rank, steps in enumerate(plan):
                expected[rank].append(one.take(rank, number, steps[number]))
        one.sync()
    found = simulate(run, len(plan))
    assert_same_bits([each[0] for each in found])
    assert_near(found[0][0], values(one.shared))
    for (_, seen), theirs in zip(found, expected, strict=True):
        assert seen == pytest.approx(theirs, rel=1e-12, nan_ok=True)


HALF = [[[1.0], [3.0, 0.5]], [[2.0]]]  # what a rank has in two steps


def test_it_is_so_on_every_kind_of_backend(cluster: Cluster):
    def run(backend: Backend):
        model = KINDS["diloco"](build(), backend)
        optimizer = sgd(model.parameters())
        for number in range(2):
            step = HALF[number] if backend.rank else []
            take(model, optimizer, backend.rank, number, step)
        return values(model)

    one = OneProcess("diloco", 2)
    for number in range(2):
        one.take(0, number, [])
        one.take(1, number, HALF[number])
    one.sync()
    found = cluster.run(run, 2)
    assert_same_bits(found)
    assert_near(found[0], values(one.shared))


def test_gradients_are_of_the_ranks_own_losses_and_nothing_is_sent():
    def run(backend: Backend):
        model, plain = LocalSGD(build(), backend, every=9), build()
        watched = Watched(backend)
        with model.step(4.5, micro_batches=2) as step:
            for loss in losses(model, backend.rank, 0, HALF[0]):
                step.backward(loss)
        (sum(losses(plain, backend.rank, 0, HALF[0])) / 4.5).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, **EXACT)
        assert (step.weight, watched.events) == (4.5, [])

    simulate(run, 2)


@pytest.mark.parametrize("micro_batches", [0, 1])
def test_with_weight_0_gradients_are_zeros_and_what_is_not_finite_stays_on_its_rank(
    micro_batches: int,
):
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1)
        optimizer = sgd(model.parameters())
        if backend.rank:
            take(model, optimizer, 1, 0, HALF[0])
        else:
            with model.step(0, micro_batches=micro_batches) as step:
                for _ in range(micro_batches):  # its gradient is 0 / 0
                    step.backward((model(torch.zeros(1, 6).double()) * 0).norm() * math.nan)
            assert math.isnan(step.loss)
            for parameter in model.parameters():
                assert torch.equal(parameter.grad, torch.zeros_like(parameter))
            model.module.inner[0].weight.data.fill_(math.nan)
            optimizer.step()
        return values(model)

    found = simulate(run, 2)
    one = OneProcess("local", 2)
    one.take(0, 0, [])
    one.take(1, 0, HALF[0])
    one.sync()
    assert_same_bits(list(found))
    assert_near(found[0], values(one.shared))


def test_what_is_frozen_by_then_has_no_gradient_with_weight_0_either():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=9)
        model.module[0].requires_grad_(False)
        with model.step(0, micro_batches=0):
            pass
        return [name for name, p in model.named_parameters() if p.grad is None]

    assert simulate(run, 1)[0] == ["0.weight", "0.bias"]


def test_without_any_weight_a_sync_is_refused_on_every_rank():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1)
        return outcome_of(lambda: take(model, sgd(model.parameters()), backend.rank, 0, [[0.0]]))

    for rank, error in enumerate(simulate(run, 3)):
        assert isinstance(error, ValueError)
        assert "all weights are 0" in str(error)
        assert f"rank {rank}: LocalSGD: weights in step() since the last sync" in str(error)


@pytest.mark.parametrize("at", ["a sync", "sync()", "means()"])
def test_ranks_of_which_only_some_use_it_are_refused(at: str):
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1 if at == "a sync" else 2)
        optimizer = sgd(model.parameters())

        def train() -> None:
            if backend.rank:
                take(model, optimizer, 1, 0, HALF[0])
            else:
                sum(losses(model, 0, 0, HALF[0])).backward()
                optimizer.step()
            if at == "sync()":
                model.sync()
            model.means()

        return outcome_of(train)

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "on all ranks or on none" in str(error) or "on all or on none" in str(error)


def test_a_rank_that_took_no_step_since_the_last_sync_has_weight_0_in_sync():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=5)
        optimizer = sgd(model.parameters())
        for number in range(backend.rank):
            take(model, optimizer, backend.rank, number, HALF[number])
        with model.averaged():
            looked = values(model)
        model.sync()
        assert_close(looked, values(model), **EXACT)
        return values(model)

    one = OneProcess("local", 3)
    one.take(1, 0, HALF[0])
    one.take(2, 0, HALF[0])
    one.take(2, 1, HALF[1])
    one.sync()
    for found in simulate(run, 3):
        assert_near(found, values(one.shared))


def test_equal_weights_are_none_to_the_last_bit():
    def run(backend: Backend, weighted: bool):
        model = LocalSGD(mlp(), backend, every=2, start_after=1)
        optimizer = sgd(model.parameters())
        for number in range(4):
            optimizer.zero_grad()
            loss = sum(losses(model.double(), backend.rank, number, [[1.0, 1.0]]))
            if weighted:
                with model.step(2.0) as step:
                    step.backward(loss)
            else:
                (loss * 0.5).backward()
            optimizer.step()
        assert (model.steps, model.meetings) == (4, 2)
        return values(model)

    plain, weighted = (simulate(lambda b, w=w: run(b, w), 3) for w in (False, True))
    for one, other in zip(plain, weighted, strict=True):
        assert_same_bits([one, other])


def test_a_sync_costs_a_message_of_16_bytes_more_and_only_after_step():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=1)
        optimizer = sgd(model.parameters())
        watched = Watched(backend)
        take_step(model, optimizer, backend.rank, 0)
        before, _ = list(watched.events), watched.clear()
        with model.step(1.0) as step:
            step.backward(sum(p.sum() for p in model.parameters()))
        optimizer.step()
        assert len(watched.events) == len(before) + 1
        assert "float64 [1, 2]" in watched.events[0]

    simulate(run, 2)


def test_a_step_that_a_scaler_skips_does_not_count():
    """Of two steps since the last sync, rank 1's first has an infinite gradient."""

    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=4)
        optimizer = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(2):
            optimizer.zero_grad()
            with model.step(weight_of(HALF[number]), micro_batches=len(HALF[number])) as step:
                for loss in losses(model, backend.rank, number, HALF[number]):
                    bad = math.inf if backend.rank and not number else 1.0
                    step.backward(scaler.scale(loss) * bad)
            scaler.step(optimizer)
            scaler.update(4.0)
        model.sync()
        return values(model)

    one = OneProcess("local", 2)
    for rank, number in [(0, 0), (0, 1), (1, 1)]:
        if (rank, number) == (1, 1):  # its buffers have seen the other batch, too
            losses(one.models[1], 1, 0, HALF[0])
        one.take(rank, number, HALF[number])
    one.sync()
    for found in simulate(run, 2):
        assert_near(found, values(one.shared))


# Compression --------------------------------------------------------------------------------


@settings(max_examples=sizes(8, 60))
@given(
    weights=st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=ranks, max_size=ranks),
            min_size=1,
            max_size=4,
        )
    ),
    compression=st.sampled_from([TopK(0.2), Quantized(4, block=16), PowerSGD(1)]),
)
def test_with_compression_what_is_sent_and_what_is_left_are_the_weighted_change(
    weights: list[list[float]], compression: Compressor
):
    """Of the ranks' parameters at the beginning of a period the plain mean is kept: what is left
    in them has its weight already, and counts whole, also on a rank that has weight 0 now.
    """
    assume(all(map(any, weights)))
    ranks = len(weights[0])

    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1, compression=compression)
        optimizer = adamw(model.parameters())
        seen = [values(model)]
        for number, row in enumerate(weights):
            hook = optimizer.register_step_post_hook(lambda *_: seen.append(values(model)))
            take(model, optimizer, backend.rank, number, [[row[backend.rank]]])
            hook.remove()
            seen.append(values(model))
        model.sync()
        return [*seen, values(model)]

    stories = simulate(run, ranks)
    names = [name for name, _ in build().named_parameters()]
    for number, row in enumerate(weights):
        for name in names:
            began, trained, after = (
                [story[2 * number + at][name] for story in stories] for at in range(3)
            )
            change = sum(
                w / sum(row) * (now - before)
                for w, now, before in zip(row, trained, began, strict=True)
            )
            expected = sum(began) / ranks + change
            torch.testing.assert_close(sum(after) / ranks, expected, rtol=1e-5, atol=1e-6)
    for name in names:  # and sync() sends the rest whole
        mean = sum(story[-2][name] for story in stories) / ranks
        torch.testing.assert_close(stories[0][-1][name], mean, rtol=1e-5, atol=1e-6)
    assert_same_bits([story[-1] for story in stories])


def test_outer_gradients_are_weighted_before_they_are_compressed():
    """What copies and residuals have is the weighted progress; rank 1 has weight 0 at times."""
    weights = [[1.0, 3.0], [2.0, 0.0], [1.0, 1.0]]

    def run(backend: Backend):
        compression = ErrorFeedback(TopK(0.2))
        model = DiLoCo(
            build(),
            backend,
            every=1,
            outer=lambda p: torch.optim.SGD(p, lr=1.0),
            compression=compression,
        )
        optimizer = adamw(model.parameters())
        story = []
        for number, row in enumerate(weights):
            trained = []
            hook = optimizer.register_step_post_hook(lambda *_, t=trained: t.append(values(model)))
            take(model, optimizer, backend.rank, number, [[row[backend.rank]]])
            hook.remove()
            story += [*trained, values(model), model.compression.state_dict()]
        return story

    stories = simulate(run, 2)
    start = dict(build().named_parameters())
    lacked = {name: torch.zeros(p.numel()).double() for name, p in start.items()}
    for number, row in enumerate(weights):
        at = 3 * number
        left = total_residual([story[at + 2] for story in stories], 2)
        for name, before in start.items():
            progress = sum(
                w / sum(row) * (before - story[at][name])
                for w, story in zip(row, stories, strict=True)
            )
            sent = before - stories[0][at + 1][name]
            sent_and_left = sent.flatten() + left[name].flatten()
            torch.testing.assert_close(
                sent_and_left.detach(),
                (progress.flatten() + lacked[name]).detach(),
                rtol=1e-5,
                atol=1e-6,
            )
        lacked = {name: value.flatten() for name, value in left.items()}
        start = {name: stories[0][at + 1][name] for name in start}


# Checkpoints --------------------------------------------------------------------------------


def values_of(state: Values) -> Values:
    return {name: state[name] for name in build().state_dict()}


MADE = {
    **KINDS,
    "top-k": lambda m, b: LocalSGD(m, b, every=EVERY, compression=TopK(0.2)),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_state_between_two_syncs_has_what_ranks_have_seen(kind: str):
    """Of the fifth of six steps: as many ranks go on bit for bit."""
    plan = [
        [[[1.0], [0.5]], [[3.0]], [[1.0]], [[0.0]], [[2.0]], [[1.0]]],
        [[[2.0]], [[0.0]], [], [[1.0, 1.0]], [], [[0.5]]],
    ]

    def train(backend: Backend, model, optimizer, numbers: range) -> None:
        for number in numbers:
            take(model, optimizer, backend.rank, number, plan[backend.rank][number])

    def whole(backend: Backend):
        model = MADE[kind](build(), backend)
        optimizer = sgd(model.parameters())
        train(backend, model, optimizer, range(5))
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        again = MADE[kind](build(), backend)
        resumed = sgd(again.parameters())
        again.load_state_dict(saved)
        resumed.load_state_dict(deepcopy(optimizer.state_dict()))
        for each, its in ((model, optimizer), (again, resumed)):
            train(backend, each, its, range(5, 6))
        for one, other in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
            assert one[0] == other[0]
            assert torch.equal(one[1], other[1]), one[0]
        return saved

    assert any(
        key.endswith(".count") and len(value) == 4 for key, value in simulate(whole, 2)[0].items()
    )


@pytest.mark.checkered
@pytest.mark.parametrize("way", ["the ranks' states", "a checkpoint"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", MADE)
def test_another_number_of_ranks_begins_from_the_weighted_mean(
    kind: str, ranks: int, way: str, tmp_path: Path
):
    """Which is the one that the ranks before would have come to; and all that they have seen counts
    on, in equal parts. As many ranks go on with their own.
    """
    weights = [weight_of(HALF[0]), weight_of(HALF[1])]  # of two ranks, since the last sync

    def save(backend: Backend):
        model = MADE[kind](build(), backend)
        optimizer = sgd(model.parameters())
        for number, step in enumerate([HALF[0], HALF[1], HALF[backend.rank]]):
            take(model, optimizer, backend.rank, number, step)
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3)
        with model.averaged():
            mean = values(model)
        return {key: value.clone() for key, value in model.state_dict().items()}, mean

    states, means = zip(*simulate(save, 2), strict=True)
    joined = {key: value for state in states for key, value in state.items()}

    def load(backend: Backend):
        model = MADE[kind](build(), backend)
        optimizer = sgd(model.parameters())
        if way == "a checkpoint":
            load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        else:
            model.load_state_dict(joined)
        loaded, trained = values(model), []
        optimizer.register_step_post_hook(lambda *_: trained.append(values(model)))
        take(model, optimizer, backend.rank, 3, [[backend.rank + 1.0]])
        assert model.meetings == 2
        return loaded, trained[0], values(model)

    found = simulate(load, ranks)
    for rank, (loaded, _, _) in enumerate(found):
        assert_close(loaded, values_of(states[rank]) if ranks == 2 else means[0], **EXACT)
    if kind == "local":
        seen = weights if ranks == 2 else [sum(weights) / ranks] * ranks
        seen = [before + rank + 1 for rank, before in enumerate(seen)]
        for name, after in found[0][2].items():
            mean = sum(w * one[1][name] for w, one in zip(seen, found, strict=True)) / sum(seen)
            torch.testing.assert_close(after, mean, **EXACT)


# Bad input ----------------------------------------------------------------------------------

WEIGHTS = [-1.0, math.nan, math.inf, torch.ones(1, requires_grad=True).sum()]


@pytest.mark.parametrize("weight", WEIGHTS, ids=["negative", "NaN", "infinite", "with a gradient"])
def test_a_bad_weight_is_refused(weight: float):
    def run(backend: Backend):
        with pytest.raises(ValueError, match=r"step\(\): weight"):
            LocalSGD(mlp(), backend, every=1).step(weight).__enter__()

    simulate(run, 1)


def test_more_and_fewer_micro_batches_than_said_are_refused():
    def run(backend: Backend, said: int):
        model = LocalSGD(build(), backend, every=9)
        with model.step(1.0, micro_batches=said) as step:
            for loss in losses(model, 0, 0, [[1.0], [1.0]]):
                step.backward(loss)

    for said, problem in [
        (1, "a micro-batch more than the 1"),
        (3, "there were 2 backward passes"),
    ]:
        with pytest.raises(MisuseError, match=problem):
            simulate(lambda b, said=said: run(b, said), 1)
    with pytest.raises(ValueError, match="needs a micro-batch"):
        simulate(lambda b: run(b, 0), 1)


def test_a_step_in_a_step_and_an_optimizers_step_in_one_are_refused():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=9)
        optimizer = sgd(model.parameters())
        for bad in (lambda: model.step(1.0).__enter__(), optimizer.step):
            with pytest.raises(MisuseError, match=r"inside step\(\)"), model.step(1.0):
                bad()

    simulate(run, 1)

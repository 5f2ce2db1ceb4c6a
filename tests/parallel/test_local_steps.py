"""What counts as a step, with any number of optimizers; and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from clusters import Cluster
from ddp_models import Fails, mlp, vectors
from ddp_runs import assert_same_bits, outcome_of
from local_runs import nesterov, plain_sgd, sgd, take_step, values
from torch import nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    CollectiveTimeoutError,
    DesyncError,
    DiLoCo,
    ErrorFeedback,
    GradScaler,
    LocalSGD,
    MisuseError,
    PeerLostError,
    Quantized,
    TopK,
    UnsupportedOperationError,
    simulate,
)
from phalanx.parallel.local_sgd.steps import StepCounter

A, B, C = (nn.Parameter(torch.zeros(1)) for _ in range(3))


def counted(all_: list[nn.Parameter], *writes: list[nn.Parameter]) -> list[int]:
    """How many steps are over before each write, and after the last."""
    counter, over, found = StepCounter(all_), 0, []
    for write in writes:
        over += counter.before(write)
        found.append(over)
        over += counter.after(write)
    assert counter.now()[0] - over in (0, 1)  # one may be under way
    return [*found, over]


def test_one_optimizer_takes_a_step_each_time():
    assert counted([A, B], [A, B], [A, B]) == [0, 1, 2]


def test_of_several_one_each_is_a_step_in_any_order():
    assert counted([A, B], [A], [B], [A], [B]) == [0, 0, 1, 1, 2]
    assert counted([A, B, C], [A], [C], [B], [B], [A], [C]) == [0, 0, 0, 1, 1, 1, 2]


def test_what_nobody_writes_is_waited_for_once():
    assert counted([A, B], [A], [A], [A]) == [0, 1, 2, 3]


def test_an_optimizer_that_comes_more_often_counts():
    assert counted([A, B], [A], [A], [A], [B], [A], [A]) == [0, 1, 2, 3, 3, 4, 4]


def test_others_parameters_count_for_nothing():
    assert counted([A], [C], [C], [A]) == [0, 0, 0, 1]


def test_an_optimizer_whose_step_is_skipped_is_not_waited_for():
    for first, second in ((A, B), (B, A)):
        counter = StepCounter([A, B])
        assert not counter.skip([first])
        assert counter.after([second])
        assert not counter.before([first])
        assert not counter.after([first])
        assert counter.skip([second])
        assert counter.now() == (2, 2, 0)


def test_a_step_that_all_optimizers_skip_does_not_count():
    counter = StepCounter([A, B])
    assert not counter.skip([A])
    assert not counter.skip([B])
    assert not counter.after([A])
    assert counter.after([B])
    assert counter.now() == (1, 1, 0)


def test_a_step_counts_with_the_weight_of_the_step_before_its_optimizers():
    counter = StepCounter([A, B])
    counter.weight = 2.0
    counter.after([A])
    counter.after([B])  # of the same micro-batches
    assert counter.seen == 2.0
    for weight, written in ((1.0, A), (4.0, B)):  # of micro-batches of their own
        counter.weight = weight
        counter.after([written])
    assert (counter.seen, counter.steps) == (7.0, 2)


def test_a_step_that_is_over_when_the_next_begins_has_its_own_weight_alone():
    counter = StepCounter([A, B])  # nobody writes B
    for weight, seen in ((1.0, None), (2.0, 1.0)):
        counter.weight = weight
        counter.before([A])
        assert counter.seen == seen
        counter.after([A])
    assert counter.seen == 3.0


def test_the_weight_of_a_step_that_is_skipped_does_not_count():
    counter = StepCounter([A])
    for weight in (1.0, 2.0):
        counter.weight = weight
        counter.skip([A])
    counter.weight = 4.0
    counter.after([A])
    assert counter.seen == 4.0


# On a model ------------------------------------------------------------------------------------


def test_two_optimizers_of_one_model_synchronize_when_both_have_stepped():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=2)
        parameters = list(model.parameters())
        both = [sgd(parameters[:3]), sgd(parameters[3:])]
        for number in range(4):
            inputs, targets = vectors(4, seed=10 * backend.rank + number)
            model.zero_grad()
            (model(inputs) - targets).pow(2).mean().backward()
            for optimizer in both:
                optimizer.step()
        assert (model.steps, model.meetings) == (4, 2)
        return values(model)

    assert_same_bits(list(simulate(run, 2)))


def test_one_optimizer_over_two_models_is_a_step_of_each():
    def run(backend: Backend):
        first = LocalSGD(nn.Linear(3, 2), backend, every=1)
        second = DiLoCo(nn.Linear(2, 2), backend, every=2, outer=plain_sgd)
        optimizer = sgd([*second.parameters(), *first.parameters()])
        for number in range(4):
            optimizer.zero_grad()
            second(first(torch.full((1, 3), backend.rank + number + 1.0))).sum().backward()
            optimizer.step()
        assert (first.steps, first.meetings, second.steps, second.meetings) == (4, 4, 4, 2)
        return values(first) | {f"second.{k}": v for k, v in values(second).items()}

    assert_same_bits(list(simulate(run, 2)))


def test_parameters_that_no_optimizer_has_are_averaged_too():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=2)
        optimizer = sgd(list(model.parameters())[:2])
        for number in range(4):
            take_step(model, optimizer, backend.rank, number)
        assert (model.steps, model.meetings) == (4, 2)
        model.sync()
        assert (model.steps, model.meetings) == (4, 2)
        return values(model)

    assert_same_bits(list(simulate(run, 2)))


def test_a_step_that_one_rank_skips_is_waited_for():
    """As a gradient scaler does that sees an infinity on one rank."""

    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=2)
        optimizer = sgd(model.parameters())
        for number in range(5 if backend.rank else 4):
            if (backend.rank, number) != (1, 1):
                take_step(model, optimizer, backend.rank, number)
        assert (model.steps, model.meetings) == (4, 2)
        return values(model)

    assert_same_bits(list(simulate(run, 2)))


@pytest.mark.parametrize("order", [1, -1], ids=["skipped first", "skipped last"])
def test_a_scaler_skips_one_of_two_optimizers_and_ranks_synchronize_between_steps(order: int):
    def run(backend: Backend) -> list[int]:
        model = LocalSGD(mlp(), backend, every=2)
        parameters, scaler = list(model.parameters()), GradScaler(backend, init_scale=1.0)
        both = [sgd(parameters[:3]), sgd(parameters[3:])]
        syncs = []
        for number in range(4):
            inputs, targets = vectors(4, seed=10 * backend.rank + number)
            model.zero_grad()
            scaler.scale((model(inputs) - targets).pow(2).mean()).backward()
            if number == 1 and backend.rank == 1:
                parameters[0].grad.fill_(float("inf"))
            for optimizer in both[::order]:
                scaler.step(optimizer)
                syncs.append(model.meetings)
            scaler.update()
        return syncs

    assert list(simulate(run, 2)) == 2 * [[0, 0, 0, 1, 1, 1, 1, 2]]


@pytest.mark.parametrize("every", [1, 2])
def test_a_sync_that_is_due_inside_a_backward_pass_is_refused(every: int):
    """Optimizers step in hooks, and those before an error have stepped: the sync is due by that."""

    def run(backend: Backend) -> None:
        module = mlp()
        module.get_submodule("2").register_forward_pre_hook(
            lambda _, given: (Fails.apply(given[0]),) if fails else given
        )
        model = LocalSGD(module, backend, every=every)
        for p in model.parameters():
            own = sgd([p])
            p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        fails = False
        for _ in range(every - 1):
            model(vectors(4)[0]).sum().backward()
        fails = True
        with pytest.raises(ArithmeticError):
            model(vectors(4)[0]).sum().backward()
        before, fails = values(model), False
        with pytest.raises(MisuseError, match=r"a sync is due .* call sync\(\) before this pass"):
            model(vectors(4)[0]).sum().backward()
        assert_same_bits([values(model), before])
        model.sync()
        model(vectors(4)[0]).sum().backward()

    simulate(run, 2)


def test_when_the_wrapper_is_gone_nothing_is_counted_and_it_may_be_wrapped_again():
    def run(backend: Backend) -> None:
        module = mlp()
        optimizer = sgd(module.parameters())
        model = LocalSGD(module, backend, every=1)
        del model
        gc.collect()
        if backend.rank:
            take_step(module, optimizer, 0, 0)  # alone
        again = LocalSGD(module, backend, every=1)
        take_step(again, optimizer, 0, 0)
        assert (again.steps, again.meetings) == (1, 1)

    simulate(run, 2)


def test_an_optimizer_of_something_else_is_none_of_its_business():
    def run(backend: Backend) -> None:
        model = LocalSGD(mlp(), backend, every=1)
        other = mlp()
        take_step(other, sgd(other.parameters()), backend.rank, 0)
        assert (model.steps, model.meetings) == (0, 0)

    simulate(run, 2)


# Ranks out of step -----------------------------------------------------------------------------


@pytest.mark.timeouts
@pytest.mark.together
def test_a_rank_that_takes_fewer_steps_is_named_and_what_to_do(cluster: Cluster):
    models = [mlp() for _ in range(2)]

    def run(backend: Backend):
        model = LocalSGD(models[backend.rank], backend, every=2)
        optimizer = sgd(model.parameters())
        for number in range(3):
            take_step(model, optimizer, backend.rank, number)
        if backend.rank == 1:
            return None
        backend.timeout = 0.25
        return outcome_of(lambda: take_step(model, optimizer, 0, 3))

    error = cluster.run(run, 2)[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert error.peer == 1
    assert "LocalSGD: this rank has taken 4 steps, 2 of them since" in str(error)
    assert "if its batches ran out" in str(error)


@pytest.mark.requires("agreement")
def test_a_rank_that_syncs_while_others_go_on_is_told_so(cluster: Cluster):
    models = [mlp() for _ in range(2)]

    def run(backend: Backend):
        model = DiLoCo(models[backend.rank], backend, every=2, outer=nesterov)
        optimizer = sgd(model.parameters())

        def train() -> None:
            for number in range(3 if backend.rank else 4):
                take_step(model, optimizer, backend.rank, number)
            model.sync()

        return outcome_of(train)

    for rank, error in enumerate(cluster.run(run, 2)):
        assert isinstance(error, DesyncError)
        assert "DiLoCo's sync 1, every 2 steps" in str(error)
        assert "DiLoCo's sync() after 1 syncs" in str(error)
        assert f"DiLoCo: this rank has taken {4 - rank} steps" in str(error)


def test_a_rank_that_has_left_is_explained():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=1)
        if backend.rank == 1:
            backend.close()
            return None
        return outcome_of(lambda: take_step(model, sgd(model.parameters()), 0, 0))

    error = simulate(run, 2)[0]
    assert isinstance(error, PeerLostError)
    assert "LocalSGD: this rank has taken 1 steps" in str(error)


# Refusals --------------------------------------------------------------------------------------

Make = Callable[[Backend], nn.Module]
OTHER_OPTIONS: dict[str, tuple[Make, str]] = {
    "every": (
        lambda b: LocalSGD(mlp(), b, every=8 + b.rank // 2),
        r"options of LocalSGD differ: rank 2 has every=9, rank 0 has every=8",
    ),
    "start_after": (
        lambda b: LocalSGD(mlp(), b, every=8, start_after=b.rank // 2),
        "start_after=1",
    ),
    "rate": (
        lambda b: DiLoCo(
            mlp(), b, every=8, outer=lambda p: torch.optim.SGD(p, lr=0.7 + b.rank // 2)
        ),
        r"options of DiLoCo differ: rank 2 has outer='SGD\(lr=1.7",
    ),
    "outer": (
        lambda b: DiLoCo(mlp(), b, every=8, outer=torch.optim.Adam if b.rank == 2 else nesterov),
        r"rank 2 has outer='Adam\(",
    ),
    "compression": (
        lambda b: DiLoCo(
            mlp(),
            b,
            every=8,
            outer=nesterov,
            compression=ErrorFeedback(Quantized(4 if b.rank == 2 else 8)),
        ),
        r"rank 2 has compression=ErrorFeedback\(Quantized\(bits=4",
    ),
    "kind": (
        lambda b: LocalSGD(nn.Linear(2, 2 + b.rank // 2), b, every=8),
        r"models differ: rank 2 has weight \(float32 \[3, 2\]\)",
    ),
}


@pytest.mark.parametrize("what", OTHER_OPTIONS)
def test_ranks_that_mean_something_else_are_told_what(what: str):
    make, words = OTHER_OPTIONS[what]

    def run(backend: Backend) -> None:
        with pytest.raises(DesyncError, match=words):
            make(backend)

    simulate(run, 3)


WRONG: list[tuple[Make, type[Exception], str]] = [
    (lambda b: LocalSGD(mlp(), b, every=0), ValueError, "at least 1, not 0"),
    (lambda b: LocalSGD(mlp(), b, every=2.5), ValueError, "at least 1, not 2.5"),  # type: ignore[arg-type]
    (lambda b: LocalSGD(mlp(), b, every=2, start_after=-1), ValueError, "0 or more, not -1"),
    (
        lambda b: DiLoCo(mlp(), b, every=2, outer=lambda p: None),  # type: ignore[arg-type,return-value]
        TypeError,
        "makes a torch optimizer",
    ),
    (
        lambda b: DiLoCo(mlp(), b, every=2, outer=lambda p: torch.optim.SGD(p[1:], 1.0)),
        MisuseError,
        "leaves out 0.weight",
    ),
    (
        lambda b: DiLoCo(mlp(), b, every=2, outer=nesterov, compression=TopK),  # type: ignore[arg-type]
        TypeError,
        "takes a compressor",
    ),
    (
        lambda b: DiLoCo(
            nn.Linear(2, 2, dtype=torch.complex64),
            b,
            every=2,
            outer=nesterov,
            compression=TopK(0.1),
        ),
        UnsupportedOperationError,
        "not complex64",
    ),
    (lambda b: LocalSGD(DDP(mlp(), b), b, every=2), MisuseError, "is a DDP already"),
    (lambda b: DDP(LocalSGD(mlp(), b, every=2), b), MisuseError, "is a LocalSGD already"),
    (lambda b: FSDP(LocalSGD(mlp(), b, every=2), b), MisuseError, "is a LocalSGD already"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_makes_no_sense_is_refused_before_anything_is_sent(number: int):
    make, kind, words = WRONG[number]

    def run(backend: Backend) -> None:
        with pytest.raises(kind, match=words):
            make(backend)

    simulate(run, 1)


def test_a_module_is_wrapped_once():
    def run(backend: Backend) -> None:
        module = mlp()
        model = LocalSGD(module, backend, every=2)
        with pytest.raises(MisuseError, match=r"0\.weight is in another wrapper already"):
            LocalSGD(module, backend, every=2)
        with pytest.raises(MisuseError, match=r"0\.weight is in another wrapper already"):
            LocalSGD(model, backend, every=2)

    simulate(run, 1)


def test_what_was_frozen_and_is_trained_later_is_refused_by_name():
    def run(backend: Backend) -> None:
        module = mlp()
        module[0].requires_grad_(False)
        model = LocalSGD(module, backend, every=2)
        optimizer = sgd(model.parameters())
        take_step(model, optimizer, 0, 0)
        module[0].requires_grad_(True)
        with pytest.raises(MisuseError, match=r"0\.weight is trained, and was frozen when"):
            take_step(model, optimizer, 0, 0)

    simulate(run, 1)


def test_where_one_only_looks_nothing_is_changed_or_saved():
    def run(backend: Backend) -> None:
        model = LocalSGD(mlp(), backend, every=2)
        optimizer = sgd(model.parameters())
        take_step(model, optimizer, 0, 0)
        for wrong in (
            lambda: take_step(model, optimizer, 0, 0),
            model.sync,
            model.means,
            model.state_dict,
            lambda: model.load_state_dict(mlp().state_dict()),
        ):
            with pytest.raises(MisuseError, match=r"inside averaged\(\)"), model.averaged():
                wrong()
        take_step(model, optimizer, 0, 0)

    simulate(run, 2)

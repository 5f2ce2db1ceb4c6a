"""What `Elastic` refuses, and that whoever trains loses nothing by what another process does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from elastic_stores import TOKEN, MemoryStore
from torch import Tensor, nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    AuthenticationError,
    Backend,
    ColumnParallelLinear,
    DesyncError,
    DeviceMesh,
    Elastic,
    InvalidWorldSizeError,
    MembershipError,
    MisuseError,
    Pipeline,
    PipelineParallelConfig,
    ShardingStrategy,
    TopK,
    UnsupportedOperationError,
)
from phalanx.checkpoint.save_plan import installed_version
from phalanx.collectives import all_reduce_
from phalanx.elastic.membership import Decision
from phalanx.elastic.stores import JobStore

STEPS = 3


def in_one(fn: Callable[[Backend], object]) -> None:
    phalanx.simulate(fn, 1)


def a_job(
    backend: Backend,
    wrap: Callable[..., nn.Module] = DDP,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    *,
    samples: int = 8,
    **options: Any,
) -> tuple[Elastic, nn.Module, Callable[[], object]]:
    """Return a job, its model, and what trains in a block."""
    job = Elastic(backend, **options)
    model = wrap(nn.Linear(2, 3), job.backend)
    its = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    batches = job.sampler(samples, batch_size=4)
    job.keep(model=model, optimizer=its)

    def loss() -> Tensor:
        its.zero_grad()
        error = model(torch.ones(len(numbers), 2)).square().mean()
        error.backward()
        return error

    def train() -> None:
        nonlocal numbers
        numbers = batches.take()
        its.step(loss)

    numbers: list[int] = []
    return job, model, train


def steps(job: Elastic, train: Callable[[], object], total: int = STEPS) -> list[int]:
    """Return the numbers of the steps that count, and of how many ranks each was."""
    counted = []
    for step in job.steps(total):
        with step:
            train()
        if step.done:
            counted.append(job.backend.world_size)
    return counted


# ------------------------------------------------------------------------------
# Before the training


@pytest.mark.parametrize(
    "options", [{"min_ranks": 0}, {"min_ranks": 4, "max_ranks": 3}, {"max_ranks": 0}]
)
def test_numbers_of_ranks_that_cannot_be_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidWorldSizeError, match=r"min_ranks=\d must be at least 1, and at"):
        in_one(lambda backend: Elastic(backend, **options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"copy_every": 0}, "copy_every=0"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1"),
        ({"checkpoint_every": 2}, "checkpoint_every needs checkpoints="),
        ({"wait": float("nan")}, "wait must be a positive number of seconds, not nan"),
        ({"timeout": -1.0}, "timeout must be a positive number of seconds"),
    ],
)
def test_numbers_of_steps_and_seconds_that_cannot_be_are_refused(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        in_one(lambda backend: Elastic(backend, **options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"copy_every": 2.5}, r"copy_every is a whole number, not 2\.5"),
        ({"min_ranks": 1.5}, "min_ranks is a whole number"),
        ({"max_ranks": "3"}, "max_ranks is a whole number"),
        ({"seed": "a"}, "seed is a whole number"),
        ({"wait": "10"}, "wait is a number of seconds"),
        ({"timeout": "10"}, "timeout is a number of seconds"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        in_one(lambda backend: Elastic(backend, **options))


@pytest.mark.parametrize("joins", [Elastic, phalanx.init])
def test_a_simulated_process_does_not_train_alone_beside_the_others(joins: Any) -> None:
    def join(backend: Backend) -> None:
        with pytest.raises(MisuseError, match=r"this is process [01] of 2 of phalanx\.simulate"):
            joins()

    phalanx.simulate(join, 2)


@pytest.mark.parametrize("name", ["gloo", "nccl", "ucc", "mpi"])
def test_backends_whose_ranks_cannot_change_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=f"'{name}'.*Elastic training takes 'tcp'"):
        Elastic(name)


def test_a_backend_that_is_made_already_is_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match="takes the name of a backend"):
        Elastic(phalanx.SimulatedBackend.create_group(1)[0])


def test_a_number_of_ranks_that_the_strategy_cannot_have_is_refused() -> None:
    def train(backend: Backend) -> None:
        def hybrid(module: nn.Module, inner: Backend) -> nn.Module:
            return FSDP(module, inner, strategy=ShardingStrategy.hybrid(2))

        job, _, step = a_job(backend, hybrid, max_ranks=1)
        steps(job, step)

    with pytest.raises(InvalidWorldSizeError, match="from 1 to 1 is a multiple of 2"):
        in_one(train)


# ------------------------------------------------------------------------------
# What is kept


def meta(job: Elastic) -> object:
    return nn.Linear(2, 2, device="meta")


def parallel(job: Elastic) -> object:
    return nn.Sequential(ColumnParallelLinear(2, 2, job.backend))


def pipeline(job: Elastic) -> object:
    return Pipeline(nn.Sequential(nn.Linear(2, 2)), job.backend, PipelineParallelConfig(1, 1))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (meta, r"model\.weight is on the meta device"),
        (lambda job: nn.LazyLinear(2), r"model\.weight is not initialized"),
        (parallel, r"model\.0 is a ColumnParallelLinear, whose ranks are not to change"),
        (pipeline, "Pipeline.*start all ranks again"),
    ],
)
def test_models_that_are_bound_to_their_ranks_or_not_there_yet_are_refused(
    make: Callable[[Elastic], object], problem: str
) -> None:
    with pytest.raises(UnsupportedOperationError, match=problem):
        in_one(lambda backend: (job := Elastic(backend)).keep(model=make(job)))


def test_an_object_without_a_state_is_named() -> None:
    with pytest.raises(TypeError, match=r"keep\(clock=\.\.\.\).*; object has none"):
        in_one(lambda backend: Elastic(backend).keep(clock=object()))


def test_a_name_is_kept_once() -> None:
    def keep_twice(backend: Backend) -> None:
        job = Elastic(backend)
        job.keep(model=nn.Linear(1, 1))
        job.keep(model=nn.Linear(1, 1))

    with pytest.raises(MisuseError, match="something is kept as 'model' already"):
        in_one(keep_twice)


def given(job: Elastic, backend: Backend) -> Backend:
    return backend


def line_of_a_mesh(job: Elastic, backend: Backend) -> Backend:
    return DeviceMesh(job.backend, [1], ["data"])["data"]


@pytest.mark.parametrize("other", [given, line_of_a_mesh])
def test_a_model_on_another_backend_is_refused(
    other: Callable[[Elastic, Backend], Backend],
) -> None:
    def train(backend: Backend) -> None:
        job = Elastic(backend)
        job.keep(model=DDP(nn.Linear(1, 1), other(job, backend)))

    with pytest.raises(MisuseError, match=r"model is on another backend: .* job\.backend"):
        in_one(train)


def test_a_state_that_is_a_tensor_is_refused() -> None:
    class Average:
        def state_dict(self) -> dict[str, Tensor]:
            return {"mean": torch.zeros(2)}

        def load_state_dict(self, state: object) -> None:
            """Nothing comes so far."""

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend)
        job.keep(average=Average())
        steps(job, step)

    with pytest.raises(MisuseError, match=r"keep\.average\.mean is a tensor.*a module's buffer"):
        in_one(train)


def test_several_optimizers_have_no_checkpoints() -> None:
    def train(backend: Backend) -> None:
        job, model, step = a_job(backend, checkpoints="nowhere")
        job.keep(other=torch.optim.SGD(model.parameters(), lr=0.1))
        steps(job, step)

    with pytest.raises(MisuseError, match="checkpoints= takes one optimizer"):
        in_one(train)


def test_a_job_keeps_a_model() -> None:
    with pytest.raises(MisuseError, match=r"steps\(\) without a model: job\.keep"):
        in_one(lambda backend: next(Elastic(backend).steps(1)))


@pytest.mark.parametrize("total", [-1, 2.5, "2", None])
def test_a_number_of_steps_is_one(total: Any) -> None:
    with pytest.raises(ValueError, match=r"Elastic\.steps\(.*\): it takes a number of steps"):
        in_one(lambda backend: next(a_job(backend)[0].steps(total)))


def test_an_optimizer_is_kept_if_it_trains_what_is_kept() -> None:
    def train(backend: Backend) -> None:
        job, model, step = a_job(backend)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        unkept = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        for each in job.steps(2):
            with each:
                step()
                unkept.step()
                if each.number == 1:
                    with pytest.raises(
                        MisuseError, match=r"\(SGD\) that is not kept trains a kept"
                    ):
                        other.step()
        other.step()  # the job is over

    phalanx.simulate(train, 2)


@pytest.mark.parametrize("wrap", [DDP, FSDP, lambda m, b: phalanx.LocalSGD(m, b, every=1)])
def test_a_wrapper_is_kept_and_not_only_the_module_in_it(
    wrap: Callable[[nn.Module, Backend], nn.Module],
) -> None:
    def begin(backend: Backend, *, both: bool) -> None:
        job, module = Elastic(backend), nn.Linear(2, 3)
        copy = torch.optim.swa_utils.AveragedModel(module)
        wrapped = wrap(module, job.backend)
        job.keep(module=module, copy=copy, **({"wrapped": wrapped} if both else {}))
        next(job.steps(1))

    in_one(lambda backend: begin(backend, both=True))
    with pytest.raises(MisuseError, match=r"weight belongs to a wrapper, .* which is not kept"):
        in_one(lambda backend: begin(backend, both=False))


def test_all_is_kept_before_the_steps_of_which_there_is_one_loop() -> None:
    def train(backend: Backend) -> None:
        job, _, _ = a_job(backend)
        next(job.steps(2))
        with pytest.raises(MisuseError, match=r"keep\(\) after steps\(\) has begun"):
            job.keep(late=nn.Linear(1, 1))
        with pytest.raises(MisuseError, match=r"keep\(\) after steps\(\) has begun"):
            job.sampler(4, batch_size=2)
        with pytest.raises(MisuseError, match=r"steps\(\) a second time"):
            next(job.steps(2))

    in_one(train)


def test_a_second_training_is_another_job() -> None:
    def train(backend: Backend) -> None:
        job, _, step = a_job(backend)
        steps(job, step)
        with pytest.raises(MisuseError, match="a second training is another job"):
            Elastic(backend)

    phalanx.simulate(train, 2)


# ------------------------------------------------------------------------------
# In a step


def first_step(use: Callable[[Elastic, nn.Module, Any, Callable[[], object]], object]) -> None:
    """Train on two ranks, and do that with the first step."""

    def train(backend: Backend) -> None:
        job, model, step = a_job(backend)
        for each in job.steps(2):
            use(job, model, each, step)

    phalanx.simulate(train, 2)


def test_a_step_is_entered() -> None:
    with pytest.raises(MisuseError, match="the block of step 0 was not entered"):
        first_step(lambda job, model, step, train: None)


def test_a_step_is_no_part_of_another_one() -> None:
    def use(job: Elastic, model: nn.Module, step: Any, train: Callable[[], object]) -> None:
        with step, step:
            train()

    with pytest.raises(MisuseError, match="a step inside another step's block"):
        first_step(use)


def test_a_step_is_taken_once() -> None:
    def use(job: Elastic, model: nn.Module, step: Any, train: Callable[[], object]) -> None:
        with step:
            train()
        with step:
            train()

    with pytest.raises(MisuseError, match="step 0 of generation 1 is over"):
        first_step(use)


def test_a_batch_is_taken_once_in_a_step_and_inside() -> None:
    def use(job: Elastic, model: nn.Module, step: Any, train: Callable[[], object]) -> None:
        with pytest.raises(MisuseError, match=r"take\(\) outside of a step's block"):
            train()
        with step:
            train()
            with pytest.raises(MisuseError, match=r"take\(\) a second time in one step"):
                train()
        with pytest.raises(MisuseError, match=r"take\(\) outside of a step's block"):
            train()

    first_step(use)


def test_groups_of_parameters_are_those_that_a_newcomer_makes() -> None:
    refused = []

    def train(backend: Backend) -> None:
        job = Elastic(backend)
        model = DDP(nn.Linear(2, 3), job.backend)
        first, second = model.parameters()
        optimizer = torch.optim.SGD([first], lr=0.1)
        job.keep(model=model, optimizer=optimizer)
        for step in job.steps(STEPS):
            words = r"groups of parameters changed in the block of step 0"
            with pytest.raises(MisuseError, match=words), step:
                optimizer.add_param_group({"params": [second]})
            refused.append(job.backend.rank)
            break

    phalanx.simulate(train, 2)
    assert sorted(refused) == [0, 1]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda parameter: parameter.detach().add_(1), "a parameter has"),
        (lambda parameter: parameter.requires_grad_(False), "a kept state or requires_grad have"),
    ],
)
def test_what_changes_between_two_steps_is_refused(
    change: Callable[[nn.Parameter], object], what: str
) -> None:
    def use(job: Elastic, model: nn.Module, step: Any, train: Callable[[], object]) -> None:
        with step:
            train()
        change(next(model.parameters()))

    with pytest.raises(MisuseError, match=f"{what} changed before the block of step 1"):
        first_step(use)


@pytest.mark.parametrize("first", [None, torch.ones(1)])
def test_a_saved_buffer_has_the_shape_that_a_newcomers_has(first: Tensor | None) -> None:
    def train(backend: Backend) -> None:
        def wrap(module: nn.Module, its: Backend) -> nn.Module:
            module.register_buffer("cache", first, persistent=False)
            module.register_buffer("saved", first)
            return DDP(module, its)

        job, model, step = a_job(backend, wrap)
        for each in job.steps(2):
            with each:
                step()
                for name in ("cache", "saved") if each.number else ("cache",):
                    setattr(model.module, name, torch.ones(2))

    with pytest.raises(MisuseError, match="the buffer saved came, or got another shape, in the bl"):
        phalanx.simulate(train, 2)


@pytest.mark.parametrize("options", [{"every": 2}, {"every": 1, "compression": TopK(0.5)}])
def test_local_sgd_syncs_in_each_step(options: dict[str, Any]) -> None:
    def local_sgd(module: nn.Module, backend: Backend) -> nn.Module:
        return phalanx.LocalSGD(module, backend, **options)

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend, local_sgd)
        steps(job, step)

    with pytest.raises(MisuseError, match="step 0 ended between two syncs of LocalSGD"):
        phalanx.simulate(train, 2)


@pytest.mark.parametrize("wrap", [DDP, FSDP, lambda m, b: phalanx.LocalSGD(m, b, every=1)])
def test_ranks_have_the_same_number_of_batches_so_there_is_no_join(
    wrap: Callable[[nn.Module, Backend], nn.Module],
) -> None:
    def train(backend: Backend) -> None:
        job, model, _ = a_job(backend, wrap)
        for step in job.steps(1):
            with step, model.join():  # type: ignore[operator]
                pass

    with pytest.raises(
        MisuseError, match=r"join\(\): on the backend of an elastic job: .*step\.weight"
    ):
        phalanx.simulate(train, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (phalanx.Scalars, r"Scalars: .* if step\.done and job\.backend\.rank == 0"),
        (lambda b: phalanx.BatchSampler(8, b, batch_size=4), r"BatchSampler: .* job\.sampler"),
        (phalanx.Notice, r"Notice: .* job\.leave\(\)"),
        (lambda b: phalanx.ParameterServer.connect([torch.ones(1)], b), "connect: .* began with"),
    ],
)
def test_what_does_not_follow_ranks_that_come_and_go_says_what_does(
    make: Callable[[Backend], object], words: str
) -> None:
    def run(backend: Backend) -> None:
        with pytest.raises(MisuseError, match="on the backend of an elastic job: ") as raised:
            make(Elastic(backend).backend)
        assert re.search(words, str(raised.value))

    in_one(run)


# ------------------------------------------------------------------------------
# Optimizers whose state belongs to the shard that it was made for


class Norms(torch.optim.SGD):
    """Keeps something that is neither of a parameter's shape nor the same for every shard."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["norms"] = torch.ones(2)
        return loss


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, Norms])
def test_state_that_cannot_be_cut_anew_is_refused_at_its_first_copy_on_every_rank(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    refused = []

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend, lambda m, b: FSDP(m, b, elementwise=True), optimizer)
        try:
            steps(job, step)
        except MisuseError as error:
            refused.append((job.done, str(error)))

    phalanx.simulate(train, 3)
    assert [done for done, _ in refused] == [1, 1, 1], refused
    assert all("cannot be cut anew" in text and "weight" in text for _, text in refused)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Adafactor, Norms])
def test_state_of_whole_parameters_need_not_be_cut(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    ends = []

    def train(backend: Backend) -> None:
        job, model, step = a_job(backend, DDP, optimizer)
        assert len(steps(job, step)) == STEPS
        ends.append([each.detach() for each in model.parameters()])

    turns = phalanx.simulate(train, 3).turns
    phalanx.simulate(train, 3, crashes={1: turns[1] * 3 // 4})
    assert len(ends) == 5


# ------------------------------------------------------------------------------
# What all ranks have alike

Change = tuple[Callable[[], object], dict[str, Any]]  # in each block, and what is kept, too


def forgotten(optimizer: torch.optim.Optimizer, backend: Backend) -> Change:
    """A schedule that is not kept. A newcomer gets the others' learning rate, and begins anew."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step).step, {}


def last_digits(optimizer: torch.optim.Optimizer, backend: Backend) -> Change:
    """A learning rate that another processor computes in another way."""
    (group,) = optimizer.param_groups
    return lambda: group.update(lr=0.1 + 1e-16 * backend.rank), {}


def of_one_rank(optimizer: torch.optim.Optimizer, backend: Backend) -> Change:
    """A learning rate by what one rank alone has."""
    (group,) = optimizer.param_groups
    return lambda: group.update(lr=1 / (1 + backend.rank)), {}


class Seen:
    """The number of samples that this rank has seen, which is not that of another one."""

    samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def counted_by_rank(optimizer: torch.optim.Optimizer, backend: Backend) -> Change:
    seen = Seen()

    def count() -> None:
        seen.samples += 1 + backend.rank

    return count, {"seen": seen}


def frozen_by_rank(optimizer: torch.optim.Optimizer, backend: Backend) -> Change:
    """A layer that one rank alone has frozen."""
    parameter = optimizer.param_groups[0]["params"][0]
    return lambda: parameter.requires_grad_(backend.rank == 0), {}


def added_by_rank(optimizer: torch.optim.Optimizer, backend: Backend) -> Change:
    """An option that one rank alone has."""
    (group,) = optimizer.param_groups
    return lambda: group.update({"warm": 1} if backend.rank else {}), {}


def train_with(
    make: Callable[[torch.optim.Optimizer, Backend], Change], arrivals: Sequence[int] = ()
) -> list[str]:
    """Train on two ranks, and those that come; return what each is told."""
    told = []

    def train(backend: Backend) -> None:
        job = Elastic(backend, max_ranks=3)
        model = DDP(nn.Linear(2, 3), job.backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        change, kept = make(optimizer, job.backend)
        job.keep(model=model, optimizer=optimizer, **kept)
        try:
            for step in job.steps(20):
                with step:
                    optimizer.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                    change()
            told.append("the end")
        except DesyncError as error:
            told.append(str(error))

    phalanx.simulate(train, 2, arrivals=arrivals)
    return told


@pytest.mark.parametrize(
    ("make", "arrivals", "words"),
    [
        (
            forgotten,
            [150],
            r"rank 0 has optimizer\.0\.lr 0\.\d+, and rank 2 optimizer\.0\.lr 0\.45",
        ),
        (of_one_rank, [], r"step 0: rank 0 has optimizer\.0\.lr 1\.0, and rank 1 \S+lr 0\.5"),
        (counted_by_rank, [], r"rank 0 has seen\.samples 1, and rank 1 seen\.samples 2"),
        (added_by_rank, [], r"rank 0 has no optimizer\.0\.warm, and rank 1 optimizer\.0\.warm 1\."),
        (frozen_by_rank, [], r"requires_grad\.\S*weight True, and rank 1 \S+weight False"),
    ],
)
def test_what_differs_between_ranks_is_told_after_the_step_on_all_of_them(
    make: Callable[[torch.optim.Optimizer, Backend], Change], arrivals: list[int], words: str
) -> None:
    told = train_with(make, arrivals)
    assert len(told) == 2 + len(arrivals)
    assert all(re.search(words, text) for text in told), told


def test_numbers_that_differ_in_their_last_digits_are_alike() -> None:
    assert train_with(last_digits) == ["the end", "the end"]


# ------------------------------------------------------------------------------
# Other processes


def linear(inputs: int, outputs: int) -> Callable[[nn.Module, Backend], nn.Module]:
    return lambda module, backend: DDP(nn.Linear(inputs, outputs), backend)


def with_dropout(module: nn.Module, backend: Backend) -> nn.Module:
    module.dropout = nn.Dropout()
    return DDP(module, backend)


class Another:
    """What the script of a newcomer has changed, and what its error says."""

    def __init__(self, here: str, there: str, *made: Any, **options: Any) -> None:
        self.words = f"it has {here}, and they have {there}"
        self.made, self.options = made, options


OTHERS = {
    "model": Another(r"weight: float32 \[3, 4\]", r"weight: float32 \[3, 2\]", linear(4, 3)),
    "modules": Another("3 modules", "2 modules", with_dropout),
    "wrapper": Another("wrapper 0: FSDP FULL_SHARD", "wrapper 0: DDP", FSDP),
    "optimizer": Another(
        "optimizer optimizer: Adam, .*", "optimizer optimizer: SGD, .*", DDP, torch.optim.Adam
    ),
    "sampler": Another("sampler 0: .*9.*", "sampler 0: .*8.*", samples=9),
    "seed": Another("seed: 3", "seed: 0", seed=3),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_newcomer_with_another_script_is_told_the_first_difference(what: str) -> None:
    other, counted = OTHERS[what], list[list[int]]()

    def train(backend: Backend) -> None:
        assert isinstance(backend, phalanx.SimulatedBackend)
        assert backend.process is not None
        if backend.process.number < 2:
            job, _, step = a_job(backend, max_ranks=3)
            counted.append(steps(job, step, 6))
            assert [each.redone for each in job.history] == [0] * len(job.history)
            return
        made = other.made
        job, _, step = a_job(backend, *made, max_ranks=3, **other.options)
        with pytest.raises(DesyncError, match=f"{other.words}. Every process runs the same script"):
            steps(job, step, 6)

    phalanx.simulate(train, 2, arrivals=[60])
    assert counted == [[2] * 6] * 2


def test_another_release_is_another_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(backend: Backend) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("importlib.metadata.version", lambda _: f"1.{backend.rank}")
            installed_version.cache_clear()
            job, _, step = a_job(backend)
            steps(job, step)

    try:
        with pytest.raises(DesyncError, match=r"it has phalanx 1\.1, and they have phalanx 1\.0"):
            phalanx.simulate(train, 2)
    finally:
        installed_version.cache_clear()


def test_a_process_with_another_token_is_no_part_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    JobStore(store, "job", TOKEN.encode()).propose(Decision(1, ("other",), "127.0.0.1:1"))
    monkeypatch.setenv("PHALANX_JOB", "job")
    monkeypatch.setenv("PHALANX_TOKEN", "quite another token of many letters")
    before = dict(store.values)
    job = Elastic("tcp", store=store)
    job.keep(model=nn.Linear(1, 1))
    with pytest.raises(AuthenticationError, match="not sealed with this process's token"):
        next(job.steps(1))
    assert store.values == before


def test_a_request_for_metrics_is_answered_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHALANX_JOB", "job")
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    monkeypatch.setenv("PHALANX_METRICS", "9400")
    Elastic("tcp", store=MemoryStore()).close()
    assert caplog.messages == [
        "PHALANX_METRICS: an elastic job serves no metrics. The training goes on"
    ]


# ------------------------------------------------------------------------------
# Too few


def test_too_few_processes_are_an_error_that_says_how_many_are_missing() -> None:
    def train(backend: Backend) -> None:
        job, _, step = a_job(backend, min_ranks=3, max_ranks=4, wait=50.0)
        steps(job, step)

    with pytest.raises(MembershipError, match=r"for 50 s for 1 more: 2 of at least 3 processes"):
        phalanx.simulate(train, 2)


def test_too_few_that_are_left_are_an_error_too() -> None:
    def train(backend: Backend) -> None:
        job, _, step = a_job(backend, min_ranks=2, wait=50.0)
        steps(job, step)

    turns = phalanx.simulate(train, 2).turns
    with pytest.raises(MembershipError, match=r"for 50 s for 1 more: 1 of at least 2 processes"):
        phalanx.simulate(train, 2, crashes={1: turns[1] * 2 // 3})


def test_a_job_that_waits_for_another_rank_goes_on_when_one_comes() -> None:
    counted = []

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend, min_ranks=2, max_ranks=2)
        counted.append(steps(job, step))

    turns = phalanx.simulate(train, 2).turns
    counted.clear()
    phalanx.simulate(train, 2, crashes={1: turns[1] * 2 // 3}, arrivals=[sum(turns)])
    assert len(counted) == 2
    assert max(map(len, counted)) == STEPS


def test_no_store_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def get(self, key: str) -> bytes:
            raise ConnectionRefusedError("nobody listens")

        set = check = compare_set = get

    monkeypatch.setenv("PHALANX_JOB", "job")
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    job = Elastic("tcp", store=Closed(), wait=0.05)
    job.keep(model=nn.Linear(1, 1))
    with pytest.raises(MembershipError, match=r"no store for 0\.05 s: .*nobody listens"):
        next(job.steps(1))


# ------------------------------------------------------------------------------
# Errors of the script


def test_an_exception_in_a_step_ends_the_job_on_that_rank_alone() -> None:
    counted = {}

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend)

        def fails() -> None:
            if backend.rank == 1 and job.done == 1:
                raise ZeroDivisionError("in the script")
            step()

        try:
            counted[backend.rank] = steps(job, fails)
        except ZeroDivisionError:
            assert job.done == 1

    phalanx.simulate(train, 3)
    assert counted == {0: [3, 2, 2], 2: [3, 2, 2]}


def test_an_error_of_the_block_that_is_caught_outside_of_it_is_not_forgotten() -> None:
    def train(backend: Backend) -> None:
        job, _, step = a_job(backend)
        for each in job.steps(3):
            with suppress(ZeroDivisionError), each:
                step()
                if backend.rank == 1:
                    raise ZeroDivisionError("in the script")

    with pytest.raises(MisuseError, match="of step 0 ended with ZeroDivisionError: in the script"):
        phalanx.simulate(train, 2)


def test_ranks_that_do_not_do_the_same_are_told_so() -> None:
    told = []

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend)

        def differs() -> None:
            step()
            if job.done == 1:
                all_reduce_(torch.zeros(2 + backend.rank), job.backend)

        try:
            steps(job, differs)
        except DesyncError as error:
            told.append(str(error))

    phalanx.simulate(train, 2)
    assert len(told) == 2
    assert all("float32 [2]" in text and "float32 [3]" in text for text in told), told


def test_who_breaks_out_of_the_loop_leaves_the_others_training() -> None:
    counted = {}

    def train(backend: Backend) -> None:
        job, _, step = a_job(backend)
        seen = counted[backend.rank] = list[int]()

        def loop() -> Iterator[None]:
            for each in job.steps(STEPS):
                with each:
                    step()
                if each.done:
                    seen.append(job.backend.world_size)
                yield

        for _ in loop():
            if backend.rank == 2:
                break

    phalanx.simulate(train, 3)
    assert counted == {0: [3, 2, 2], 1: [3, 2, 2], 2: [3]}

"""What users combine with `Elastic`, while ranks crash: all comes to the oracle's end.

The oracle is training that saves a checkpoint where a generation begins, and loads it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_script import (
    STEPS,
    WAYS,
    Model,
    Run,
    Share,
    Training,
    Way,
    check,
    filled,
    joined_batches,
    loss_of,
    number_of,
    oracle,
    script,
    train,
    wrapped,
)
from forms import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import phalanx
from phalanx import DDP, FSDP, Backend, Elastic, ShardingStrategy
from phalanx.collectives import ReduceOp, all_gather_object, all_reduce_, all_reduce_coalesced_
from phalanx.elastic.site import SimulatedSite
from phalanx.errors import CheckpointNotFoundError

Optimizer = torch.optim.Optimizer


def stepped(model: nn.Module, optimizer: Optimizer, share: Share, at: int = 0) -> None:
    (loss_of(model, share, at) * share.weight).backward()
    optimizer.step()


def trained_by(
    optimizer: Optimizer,
    model: nn.Module,
    step: Callable[[nn.Module, Optimizer, Share], object] = stepped,
    **others: Any,
) -> Training:
    """Return a training of one model by one optimizer, the gradients of which are 0 before."""

    def clean(share: Share) -> None:
        optimizer.zero_grad()
        step(model, optimizer, share)

    return Training(clean, {"model": model}, [optimizer], others)


def with_adam(
    model: nn.Module,
    step: Callable[[nn.Module, Optimizer, Share], object] = stepped,
    **others: Any,
) -> Training:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return trained_by(torch.optim.Adam(parameters, lr=0.1), model, step, **others)


# ------------------------------------------------------------------------------
# Modules


def with_average(backend: Backend) -> Training:
    """The moving average of the parameters is a second module."""
    model = DDP(Model(), backend)
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    plain = with_adam(model)

    def step(share: Share) -> None:
        plain.step(share)
        average.update_parameters(model.module)

    return Training(step, {"model": model, "average": average}, plain.optimizers)


class Normed(nn.Module):
    """Batch normalization, of this rank's part or of all; its running means are buffers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 5), norm, nn.Linear(5, 1)
        filled(self)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:  # of which there is no variance
            inputs = torch.cat([inputs, inputs / 2])
            return self.second(self.norm(self.first(inputs)))[:1]
        return self.second(self.norm(self.first(inputs)))


def batch_norm(backend: Backend) -> Training:
    return with_adam(DDP(Normed(nn.BatchNorm1d(5)), backend))


def sync_batch_norm(backend: Backend) -> Training:
    return with_adam(DDP(Normed(phalanx.SyncBatchNorm(5, backend)), backend))


class Tied(Model):
    """The two layers have one bias, and a frozen factor."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(5, 5).double()
        self.third.weight = nn.Parameter(torch.eye(5, dtype=torch.float64), requires_grad=False)
        self.third.bias = self.first.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.third(self.first(inputs))))


def tied(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    return with_adam(wrap(Tied(), backend))


class Branches(Model):
    """A layer that only every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(1, 1).double()
        filled(self)
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return self.odd(outputs) if self.step % 2 else outputs


def branches(backend: Backend) -> Training:
    module = Branches()

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        module.step = share.step
        stepped(model, optimizer, share)

    return with_adam(DDP(module, backend, find_unused_parameters=True), step)


def plain_module(backend: Backend) -> Training:
    """No wrapper: the script averages the gradients itself, and sets them to 0 behind the step."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(share: Share) -> None:
        (loss_of(model, share) * share.weight).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        all_reduce_coalesced_(gradients, backend, ReduceOp.MEAN)
        all_reduce_(model.seen, backend, ReduceOp.MEAN)
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, {"model": model}, [optimizer])


# ------------------------------------------------------------------------------
# Steps


class Unbuffered(nn.Module):
    """Nothing but what all ranks have after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        filled(self)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def two_optimizers(backend: Backend) -> Training:
    """As a GAN: collectives follow an optimizer's step, so ranks may be between two versions."""
    models = [DDP(Unbuffered(), backend), DDP(Unbuffered(), backend)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in models]

    def step(share: Share) -> None:
        for model, other, optimizer in zip(models, reversed(models), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.no_grad():
                theirs = other.module.second(torch.tanh(other.module.first(share.inputs)))
            ((model(share.inputs) - theirs).square().mean() * share.weight).backward()
            optimizer.step()

    return Training(step, {"first": models[0], "second": models[1]}, optimizers)


def scaled(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """Losses are scaled, and step 1 is skipped, as one rank's gradients are infinite."""
    scaler = phalanx.GradScaler(backend, init_scale=4.0, growth_interval=1)

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        infinite = share.step == 1 and backend.rank == backend.world_size - 1
        loss = loss_of(model, share) * share.weight * (float("inf") if infinite else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        phalanx.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()

    return with_adam(wrap(Model(), backend), step, scaler=scaler)


def joined_step(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """`model.step()`: each rank has as many micro-batches as samples."""

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        rows = share.inputs if share.weight else share.inputs[:0]
        with model.step(len(rows), micro_batches=len(rows)) as its:  # type: ignore[operator]
            for row in rows:
                its.backward((model(row[None]) - row.sum()).square().sum())
        optimizer.step()

    return with_adam(wrap(Model(), backend), step)


def accumulated(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """Two backward passes, of which the first one only accumulates; and a validation."""
    validated = torch.zeros(1, dtype=torch.float64)

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        with model.no_sync():  # type: ignore[operator]
            (loss_of(model, share) * share.weight).backward()
        stepped(model, optimizer, share, 1)
        model.eval()
        with torch.no_grad():
            validated.copy_(loss_of(model, share))
        all_reduce_(validated, backend)
        model.train()

    return with_adam(wrap(Model(), backend), step)


def zeroed_last(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    """Gradients are set to 0 behind the step; those of a step that is taken again do not stay."""
    plain = with_adam(wrap(Model(), backend))
    model, (optimizer,) = plain.model, plain.optimizers

    def step(share: Share) -> None:
        stepped(model, optimizer, share)
        optimizer.zero_grad()

    return Training(step, plain.modules, plain.optimizers)


class Agreed(Optimizer):
    """Changes its state, meets the other ranks, and changes the parameters only then."""

    def __init__(self, parameters: Iterable[nn.Parameter], backend: Backend) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._backend = backend

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        parameters = self.param_groups[0]["params"]
        for each in parameters:
            self.state[each].setdefault("sum", torch.zeros_like(each)).add_(each.grad)
        self._backend.barrier()
        for each in parameters:
            each.sub_(self.state[each]["sum"], alpha=self.param_groups[0]["lr"])


def agreed(backend: Backend) -> Training:
    model = DDP(Model(), backend)
    return trained_by(Agreed(model.parameters(), backend), model)


class Remembers(Optimizer):
    """Keeps what torch's own do not: a list that grows in place, a number that belongs to no
    parameter, and an option that its first step adds.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        for group in self.param_groups:
            group["sum"] = group.get("sum", 0) + 1
            for each in group["params"]:
                seen = state[each].setdefault("seen", [])
                seen.append(0.5)
                each.sub_(each.grad, alpha=0.01 * (state["steps"] + group["sum"] + sum(seen)))


def remembers(wrap: Callable[[nn.Module, Backend], nn.Module], backend: Backend) -> Training:
    model = wrap(Model(), backend)
    return trained_by(Remembers(model.parameters()), model)


def remembers_sharded(backend: Backend) -> Training:
    model = DDP(Model(), backend)
    return trained_by(phalanx.ShardedOptimizer(Remembers, model), model)  # type: ignore[arg-type]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def compiled(backend: Backend) -> Training:
    model = DDP(Model(), backend)
    fast = torch.compile(model, backend="eager")
    return with_adam(model, lambda _, optimizer, share: stepped(fast, optimizer, share))


def overlapped(backend: Backend) -> Training:
    """A collective that is begun before the optimizer's step; on rank 0 it is over by then."""

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        loss = model(share.inputs).square().mean()
        (loss * share.weight).backward()
        pending = phalanx.async_all_reduce(loss.detach(), backend)
        if backend.rank == 0:
            pending.wait()
        optimizer.step()
        pending.wait()

    return with_adam(DDP(Unbuffered(), backend), step)


class Counting(Model):
    """A checkpoint has more of it than parameters and buffers. Of what differs, rank 0's counts."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.sums = 0, torch.zeros(2, dtype=torch.float64)

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "sums": self.sums}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes, self.sums = state["passes"], state["sums"].clone()

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.sums += inputs.sum()
        return super().forward(inputs) * (1 + self.passes / 8) + self.sums.mean()


class Teacher(Unbuffered):
    """A moving average of a layer's weights, which the forward pass moves."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], object]) -> None:
        super().__init__()
        self.move, self.teacher = move, nn.Linear(5, 1)
        filled(self.teacher).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = zip(self.teacher.parameters(), self.second.parameters(), strict=True)
        with torch.no_grad():
            for pair in pairs:
                self.move(*pair)
        hidden = torch.tanh(self.first(inputs))
        return self.second(hidden) + self.teacher(hidden)


def set_anew(mine: nn.Parameter, other: nn.Parameter) -> None:
    mine.data = mine.data * 0.9 + other.data * 0.1


def uncounted(mine: nn.Parameter, other: nn.Parameter) -> None:
    mine.data.mul_(0.9).add_(other.data, alpha=0.1)


def in_place(mine: nn.Parameter, other: nn.Parameter) -> None:
    mine.lerp_(other, 0.1)


class Codebook(Unbuffered):
    """A large buffer that changes without being counted; on rank 0 not in the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(9000, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.codes.data.mul_(0.5).add_(inputs.detach().sum())
        return super().forward(inputs) + self.codes[0]


class Halves(nn.Module):
    """A layer whose ranks have shards, and one that each has whole."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.sharded = FSDP(filled(nn.Linear(3, 5)), backend)
        self.whole = DDP(filled(nn.Linear(5, 1)), backend)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.whole(torch.tanh(self.sharded(inputs)))


def searched(backend: Backend) -> Training:
    """L-BFGS: several backward passes in an optimizer's step, and a loss that all ranks have."""
    model = DDP(Unbuffered(), backend)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(share: Share) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, share) * share.weight
            loss.backward()
            return float(phalanx.all_reduce(loss.detach(), backend, ReduceOp.MEAN))

        optimizer.step(closure)

    return Training(step, {"model": model}, [optimizer])


def compressed_averages(backend: Backend) -> Training:
    """What compression leaves out of a mean is different on each rank, until `sync`."""
    compression = phalanx.ErrorFeedback(phalanx.TopK(0.5))
    model = phalanx.LocalSGD(Unbuffered(), backend, every=1, compression=compression)

    def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
        stepped(model, optimizer, share)
        model.sync()  # type: ignore[operator]

    return with_adam(model, step)


HYBRID = wrapped(lambda m, b: FSDP(m, b, strategy=ShardingStrategy.hybrid(2)))
COMBINED: Mapping[str, Way] = {
    "average": Way(with_average),
    "batch_norm": Way(batch_norm),
    "sync_batch_norm": Way(sync_batch_norm),
    "tied_ddp": Way(partial(tied, DDP)),
    "tied_fsdp": Way(partial(tied, FSDP)),
    "branches": Way(branches),
    "plain_module": Way(plain_module),
    "two_optimizers": Way(two_optimizers),
    "scaled_ddp": Way(partial(scaled, DDP)),
    "scaled_fsdp": Way(partial(scaled, FSDP)),
    "joined_step_ddp": Way(partial(joined_step, DDP)),
    "joined_step_fsdp": Way(partial(joined_step, FSDP)),
    "accumulated_ddp": Way(partial(accumulated, DDP)),
    "accumulated_fsdp": Way(partial(accumulated, FSDP)),
    "zeroed_last_ddp": Way(partial(zeroed_last, DDP)),
    "zeroed_last_fsdp": Way(partial(zeroed_last, FSDP)),
    "agreed": Way(agreed),
    "overlapped": Way(overlapped),
    "remembers_ddp": Way(partial(remembers, DDP)),
    "remembers_fsdp": Way(partial(remembers, partial(FSDP, elementwise=True))),
    "remembers_sharded": Way(remembers_sharded),
    "counting_ddp": Way(lambda backend: with_adam(DDP(Counting(), backend))),
    "counting_fsdp": Way(lambda backend: with_adam(FSDP(Counting(), backend))),
    "teacher_set_anew": Way(lambda backend: with_adam(DDP(Teacher(set_anew), backend))),
    "teacher_uncounted": Way(lambda backend: with_adam(DDP(Teacher(uncounted), backend))),
    "teacher_in_place": Way(lambda backend: with_adam(DDP(Teacher(in_place), backend))),
    "codebook_ddp": Way(lambda backend: with_adam(DDP(Codebook(), backend))),
    "codebook_fsdp": Way(lambda backend: with_adam(FSDP(Codebook(), backend))),
    "halves": Way(lambda backend: with_adam(Halves(backend))),
    "searched": Way(searched),
    "compressed_averages": Way(compressed_averages),
    "no_state": wrapped(DDP, sgd),
    "no_state_sharded": wrapped(FSDP, sgd),
    "shuffled": Way(WAYS["full_shard"].make, {"seed": 3}, samples=10),
    "drop_last": Way(WAYS["ddp"].make, {"drop_last": True, "seed": 1}, samples=11),
    "lengths": Way(WAYS["ddp"].make, {"lengths": [*range(13)], "pool": 2}, samples=13),
    **({"compiled": Way(compiled)} if LONG else {}),  # 3 s, of torch's compiler
}


@pytest.mark.parametrize("name", COMBINED)
def test_the_end_is_that_of_checkpoints_whatever_is_combined(name: str) -> None:
    way, place = COMBINED[name], [*COMBINED].index(name)
    run, turns = train(way, 3)
    assert [end.counted for end in run.ends.values()] == [list(range(STEPS))] * 3
    for process in range(3):
        few = [turns[process] * (9 + 2 * ((place + process) % 4)) // 16]  # one in each quarter
        for turn in range(turns[process]) if LONG else few:
            run, _ = train(way, 3, {process: turn})
            assert run.ends.keys() == {0, 1, 2} - {process}


@contextmanager
def several_hosts() -> Iterator[None]:
    """Each rank is on a host of its own. Its memory is lost with it, but for copies on the next."""
    meet = SimulatedSite.meet

    def apart(site: SimulatedSite, generation: int, rank: int, size: int, *rest: Any) -> Backend:
        made = meet(site, generation, rank, size, *rest)
        made.topology = tuple(range(size))
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SimulatedSite, "meet", apart)
        yield


ON_HOSTS = ["full_shard", "sharded_optimizer", "two_optimizers", "overlapped"]


@pytest.mark.parametrize("name", ON_HOSTS)
def test_the_end_is_that_of_checkpoints_also_on_several_hosts(name: str) -> None:
    way, place = {**WAYS, **COMBINED}[name], len(name)
    with several_hosts():
        run, turns = train(way, 3)
        assert [end.counted for end in run.ends.values()] == [list(range(STEPS))] * 3
        for process in range(3):
            few = [turns[process] * (9 + 2 * ((place + process) % 4)) // 16]
            for turn in range(turns[process]) if LONG else few:
                run, _ = train(way, 3, {process: turn})
                assert run.ends.keys() == {0, 1, 2} - {process}


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["ddp", *ON_HOSTS]),
    st.dictionaries(st.integers(0, 2), st.integers(0, 260), max_size=1),
    st.lists(st.integers(0, 600), min_size=1, max_size=2),
    st.integers(0, 99),
)
def test_hosts_come_and_one_is_lost(
    name: str, crashes: dict[int, int], arrivals: list[int], seed: int
) -> None:
    with several_hosts():
        run, _ = train({**WAYS, **COMBINED}[name], 3, crashes, arrivals, seed)
    assert run.ends.keys() >= {0, 1, 2} - crashes.keys()


@pytest.mark.parametrize("crashed", range(3))
def test_a_sampler_and_a_loader_in_one_step_deal_each_sample_once_in_an_epoch(crashed: int) -> None:
    options: list[dict[str, Any]] = [{"batch_size": 4, "seed": 1}, {"batch_size": 2, "seed": 2}]
    seen: dict[int, list[list[int]]] = {}

    def take(backend: Backend) -> None:
        job, process = Elastic(backend), number_of(backend)
        dealers = [
            job.sampler(10, **options[0]),
            job.loader(range(7), drop_last=True, collate_fn=list, **options[1]),  # type: ignore[arg-type]
        ]
        job.keep(model=Model())
        seen[process] = []
        for step in job.steps(8):
            with step:
                taken = [each.take() for each in dealers]
                weights = [each.weight for each in dealers]
                told = all_gather_object([weights, taken], job.backend)
            if step.done:
                first, second = (
                    [number for weights, taken in told if weights[at] for number in taken[at]]
                    for at in (0, 1)
                )
                seen[process].append(first + second)

    turns = phalanx.simulate(take, 3).turns
    phalanx.simulate(take, 3, crashes={crashed: turns[crashed] * 2 // 3})
    firsts = joined_batches(10, **options[0])
    seconds = joined_batches(7, drop_last=True, **options[1])
    expected = [first + second for first, second in islice(zip(firsts, seconds, strict=True), 8)]
    assert [joined for process, joined in seen.items() if process != crashed] == [expected] * 2


def test_ranks_that_are_all_between_two_versions_go_back_to_the_kept_one() -> None:
    way = COMBINED["two_optimizers"]
    _, turns = train(way, 3)
    apart = 1 if LONG else 4
    for turn in range(turns[0] * 9 // 16, turns[0], apart):  # also in the second's collectives
        run, _ = train(way, 3, {0: turn})
        assert run.ends.keys() == {1, 2}


@pytest.mark.parametrize("name", ["plain_module", "agreed"])
def test_gradients_and_state_of_a_step_that_is_taken_again_do_not_stay(name: str) -> None:
    """No wrapper drops a plain module's gradients, and its script sets them to 0 behind the step.
    No parameter has changed when `Agreed` meets the others.
    """
    way = COMBINED[name]
    _, turns = train(way, 3)
    for turn in range(turns[2] // 2, turns[2] * 3 // 4):  # about a step
        train(way, 3, {2: turn})


def test_gradients_are_unscaled_once_in_a_step_that_is_taken_again() -> None:
    way = COMBINED["scaled_fsdp"]
    _, turns = train(way, 3)
    for turn in range(turns[0] * 9 // 16, turns[0] * 10 // 16 + 1):  # also while ranks clip
        run, _ = train(way, 3, {0: turn})
        assert run.ends.keys() == {1, 2}


# ------------------------------------------------------------------------------
# Ranks come and go


@pytest.mark.parametrize("crashed", range(4))
def test_strategies_of_groups_have_whole_groups_and_the_others_stand_by(crashed: int) -> None:
    run, turns = train(HYBRID, 5)
    assert run.generations == {1: (0, 4)}
    assert set(run.left.values()) == {0}  # one comes after the end
    process = next(process for process, end in run.ends.items() if end.rank == crashed)
    run, _ = train(HYBRID, 5, {process: turns[process] * 7 // 16})
    sizes = [size for _, size in run.generations.values()]
    assert sizes == ([4, 4] if crashed else [4, 2, 4])  # rank 0 alone knows who stands by
    assert len(run.ends) == 4


@pytest.mark.parametrize(("name", "every"), [("full_shard", 3), ("full_shard", 10), ("top_k", 2)])
def test_steps_since_the_last_copy_are_taken_again(name: str, every: int) -> None:
    way, again = WAYS[name], 0
    _, turns = train(way, 3, steps=6, copy_every=every)
    for turn in range(turns[1] // 3, turns[1], 1 if LONG else turns[1] // 8):
        run, _ = train(way, 3, {1: turn}, steps=6, copy_every=every, redone=True)
        for end in run.ends.values():
            redone = [number for number in end.counted if end.counted.count(number) > 1]
            assert sorted(set(end.counted)) == list(range(6))
            assert len(redone) // 2 == end.redone == end.job.history[-1].redone < every
            again += end.redone
    assert again


def test_steps_are_taken_again_also_if_a_rank_is_lost_at_the_end() -> None:
    options: dict[str, Any] = {"steps": 6, "copy_every": 10, "redone": True}
    _, turns = train(WAYS["full_shard"], 3, **options)
    runs = [train(WAYS["full_shard"], 3, {1: turns[1] - back}, **options)[0] for back in (3, 2, 1)]
    assert {end.redone for run in runs for end in run.ends.values()} == {0, 5, 6}


@pytest.mark.parametrize("name", ["ddp", "full_shard", "top_k", "diloco"])
def test_who_arrives_joins_with_the_state_of_the_others(name: str) -> None:
    _, turns = train(WAYS[name], 2, most=3)
    run, _ = train(WAYS[name], 2, arrivals=[sum(turns) * 2 // 3])
    first, *_, last = run.ends[0].job.history
    assert (first.world_size, first.joined) == (2, (0, 1))
    assert (last.world_size, last.joined, last.lost, last.redone) == (3, (2,), (), 0)
    assert 0 < last.first_step <= STEPS
    assert run.ends[2].counted == list(range(last.first_step, STEPS))
    assert run.ends[2].job.generation == last.number == run.ends[2].job.history[0].number


class Thawed(Model):
    """The first layer is frozen until it is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def thaw(self) -> None:
        self.first.requires_grad_(True).eval()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if self.first.training else inputs * 2)


@pytest.mark.parametrize("wrap", [DDP, FSDP])
def test_a_newcomer_trains_the_layers_that_the_others_train_by_then(wrap: Any) -> None:
    def thawed(begun: Callable[[int], bool], backend: Backend) -> Training:
        module = Thawed()

        def step(model: nn.Module, optimizer: Optimizer, share: Share) -> None:
            if begun(share.step):
                module.thaw()
            stepped(model, optimizer, share)

        model = wrap(module, backend)
        return trained_by(torch.optim.Adam(model.parameters(), lr=0.1), model, step)

    once, again = (
        Way(partial(thawed, begun)) for begun in (lambda step: step == 1, lambda step: step >= 1)
    )
    first_steps = []
    for arrival in range(150, 270, 30):
        run = Run()
        turns = phalanx.simulate(script(once, 3, run, steps=8), 2, arrivals=[arrival]).turns
        check(again, run, steps=8)
        first_steps.append(run.ends[2].counted[0])
    assert {2, 3} <= {*first_steps}  # with the vote on step 1, and later
    for turn in range(turns[1]) if LONG else (turns[1] // 3, turns[1] // 2):
        run = Run()
        phalanx.simulate(script(once, 3, run, steps=8), 2, crashes={1: turn}, arrivals=[arrival])
        check(again, run, steps=8)


@pytest.mark.parametrize("name", ["ddp", "full_shard"])
def test_a_newcomer_to_a_rank_that_is_alone_begins_anew_or_says_what_is_lost_or_takes_over(
    name: str,
) -> None:
    way = WAYS[name]
    _, alone = train(way, 1, most=2)
    arrivals = [alone[0] * 2 // 3]
    _, turns = train(way, 1, arrivals=arrivals)
    for turn in range(0, turns[1], 1 if LONG else 5):
        run, _ = train(way, 1, {1: turn}, arrivals)
        assert run.ends.keys() == {0}
    came_to = []
    for turn in range(arrivals[0], turns[0], 1 if LONG else 5):
        try:
            run, _ = train(way, 1, {0: turn}, arrivals)
        except CheckpointNotFoundError:
            came_to.append("its state is lost")
        else:
            came_to.append("taken over" if run.ends[1].counted[0] else "begun anew")
    order = ["begun anew", "its state is lost", "taken over"]  # as the crash is later
    assert came_to == sorted(came_to, key=order.index)
    assert {*came_to} >= {"begun anew", "taken over"}


@pytest.mark.parametrize("saves", [False, True], ids=["no checkpoint", "checkpoints"])
def test_if_all_are_lost_who_stood_by_begins_with_the_newest_checkpoint(
    saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way, run = WAYS["full_shard"], Run()
    saved: dict[str, Any] = {"checkpoints": tmp_path, "checkpoint_every": 2} if saves else {}
    function = script(way, 2, run, steps=6, **saved)
    phalanx.simulate(function, 2, crashes={0: 140, 1: 134}, arrivals=[50, 60])
    assert run.ends.keys() == {2, 3}
    first = run.ends[2].counted[0]
    assert (first > 0) is saves
    says = "goes on from the newest checkpoint" if saves else "begins anew with step 0"
    assert f"all who trained have ended. The training {says}" in caplog.text
    run.generations = {1: (0, 2), 2: (first, 2)}
    check(way, run, steps=6)


def test_who_comes_after_the_end_ends_with_exit_code_0_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codes = set()
    for turn in range(0, 400, 40):
        run, _ = train(WAYS["ddp"], 2, arrivals=[turn])
        codes |= set(run.left.values())
    assert codes == {0}
    assert any("came after the job's last step, and ends" in text for text in caplog.messages)


def test_a_rank_that_waits_takes_the_place_of_one_that_is_lost() -> None:
    _, turns = train(WAYS["full_shard"], 3, most=2)
    run, _ = train(WAYS["full_shard"], 3, {1: turns[1] * 2 // 3}, most=2)
    assert run.ends.keys() == {0, 2}
    assert [size for _, size in run.generations.values()] == [2, 2]


def leaves(who: Callable[[int], bool], step: int) -> Callable[[Elastic, int], None]:
    """Return what lets these processes leave after a step."""

    def after(job: Elastic, process: int) -> None:
        if who(process) and job.done == step:
            job.leave()

    return after


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("name", ["ddp", "full_shard", "top_k", "local_sgd"])
def test_who_leaves_is_not_missed(name: str, leaver: int) -> None:
    after = leaves(lambda process: process == leaver, 1)
    run, _ = train(WAYS[name], 3, after=after, copy_every=10)
    assert run.left == {leaver: 75}
    assert [end.counted for end in run.ends.values()] == [list(range(STEPS))] * 2
    assert [end.redone for end in run.ends.values()] == [0, 0]
    _, second = run.ends[1].job.history
    assert (second.lost, second.first_step) == (
        (leaver,),
        3 if name != "ddp" else second.first_step,
    )


class Dropped(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(inputs, 0.5))


def dropped(backend: Backend) -> Training:
    return with_adam(DDP(Dropped(), backend, broadcast_buffers=False), stepped)


def test_a_crash_and_a_notice_before_the_same_step_come_to_the_same_end() -> None:
    """Also where steps draw at random: random states begin anew in each generation."""
    ends: dict[object, list[Tensor]] = {}
    way, runs = Way(dropped), 0

    def compare(run: Run) -> None:
        nonlocal runs
        generations = tuple(run.generations[number] for number in sorted(run.generations))
        for end in run.ends.values():
            same = ends.setdefault((generations, end.rank), end.tensors)
            assert all(map(torch.equal, same, end.tensors)), generations
        runs += 1

    def without_oracle(crashes: Mapping[int, int], **options: Any) -> list[int]:
        run = Run()
        turns = phalanx.simulate(script(way, 3, run, **options), 3, crashes=crashes).turns
        compare(run)
        return turns

    turns = without_oracle({})[2]
    for step in range(STEPS):
        without_oracle({}, after=leaves(lambda process: process == 2, step))
    for turn in range(turns // 4, turns, 1 if LONG else 4):
        without_oracle({2: turn})
    assert 3 * runs > len(ends) > 3 * STEPS


# ------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize("name", ["ddp", "full_shard"])
def test_a_job_that_has_ended_whole_goes_on_from_its_newest_checkpoint(
    name: str, tmp_path: Path
) -> None:
    way, options = WAYS[name], {"checkpoints": tmp_path, "checkpoint_every": 2}
    everyone = leaves(lambda process: True, 2)
    run, _ = train(way, 3, steps=6, after=everyone, **options)
    assert run.left == {0: 75, 1: 75, 2: 75}
    assert run.generations == {1: (0, 3)}

    second = Run()
    phalanx.simulate(script(way, 3, second, steps=6, **options), 3)
    assert second.generations == {1: (3, 3)}
    for end in second.ends.values():
        assert end.counted == [3, 4, 5]
        assert all(map(torch.equal, end.tensors, oracle(way, ((0, 3), (3, 3)), 6)[end.rank]))

    for steps in (6, 4):  # as many as are behind it, and fewer
        third = Run()
        phalanx.simulate(script(way, 2, third, steps=steps, **options), 2)
        assert [end.counted for end in third.ends.values()] == [[], []]


def test_checkpoints_are_saved_while_ranks_crash(tmp_path: Path) -> None:
    way = WAYS["full_shard"]
    options = {"steps": 5, "checkpoint_every": 1}
    _, turns = train(way, 3, checkpoints=tmp_path / "whole", **options)
    for turn in range(turns[1] // 4, turns[1], 1 if LONG else turns[1] // 8):
        folder = tmp_path / str(turn)
        run, _ = train(way, 3, {1: turn}, checkpoints=folder, **options)
        assert run.ends.keys() == {0, 2}
        newest = phalanx.latest_checkpoint(folder)
        assert newest is not None
        model = Model()
        assert phalanx.load_checkpoint(newest, model=model).step == 5


def test_if_no_version_is_complete_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    """Two ranks of one group are gone before the others had kept what they alone had."""
    way = WAYS["full_shard"]
    options: dict[str, Any] = {"steps": 5, "copy_every": 2, "checkpoint_every": 2}
    _, turns = train(way, 4, checkpoints=tmp_path / "whole", **options)
    crashes = {1: turns[1] * 3 // 4, 2: turns[2] * 3 // 4}
    run, _ = train(way, 4, crashes, checkpoints=tmp_path / "crashed", redone=True, **options)
    assert run.ends.keys() == {0, 3}
    assert all(sorted(set(end.counted)) == list(range(5)) for end in run.ends.values())

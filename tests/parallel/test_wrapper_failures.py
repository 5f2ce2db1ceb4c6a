"""A pass that goes wrong: what the others learn, how training goes on, and what is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Fails, noise, seeded
from ddp_runs import (
    Gradients,
    Watched,
    assert_close,
    assert_same_bits,
    gradients,
    naive_gradients,
    outcome_of,
)
from fsdp_runs import MESSAGES, gradient_pieces, joined
from torch import Tensor, nn
from wrappings import (
    DDPS,
    FSDPS,
    FULL_SHARD_BY_MESSAGES,
    WRAPPINGS,
    Wrapping,
    assert_gradients,
    every_ddp,
    every_fsdp,
    every_wrapping,
)

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    PeerLostError,
    UnsupportedOperationError,
    simulate,
)
from phalanx.fsdp.flat_param import FlatParameter
from phalanx.fsdp.parameter_group import ForwardCall
from phalanx.fsdp.runtime import FsdpRuntime
from phalanx.fsdp.unsharded import UnshardedParameter
from phalanx.parallel.reducer import Reducer

RANKS = 3


class Layer(nn.Module):
    """Computes, or fails: in forward, or where backward comes to its end, middle or beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "backward, input":
            x = Fails.apply(x)
        x = torch.tanh(self.one(x))
        if self.how == "forward":
            raise ArithmeticError("a bad batch")
        if self.how == "backward":
            x = Fails.apply(x)
        x = self.two(x)
        return Fails.apply(x) if self.how == "backward, output" else x


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build() -> nn.Module:
    return seeded(Fragile)


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


def fail(wrapped: Any, seed: int, place: int, how: str) -> None:
    """A pass that fails at a layer, on who calls this; some gradients are on their way by then."""
    layer = wrapped.module.layers[place]
    layer.how = how
    x = noise(4, 6, seed=seed).requires_grad_()  # so that backward goes on to the very end
    with pytest.raises((ArithmeticError, KeyboardInterrupt)):
        wrapped(x).pow(2).sum().backward()
    layer.how = ""
    wrapped.zero_grad()


WAYS_TO_FAIL = [
    *((place, how) for place in (0, 3) for how in ("forward", "interrupt", "backward")),
    (3, "backward, output"),  # before any gradient
    (3, "backward, input"),
    (1, "backward, input"),
    (0, "backward, input"),  # after all gradients
]
LAYERS = {"unit": Layer}  # an option of FSDP's
NESTED = {"unit": (nn.Sequential, nn.Linear)}


# On every rank ---------------------------------------------------------------------------------


def passes_around_failures(place: int, how: str) -> Callable[[Any, int], None]:
    """The last of passes before and after which there were some that failed."""

    def one(model: Any, rank: int) -> None:
        if isinstance(model, (DDP, FSDP)):
            fail(model, 90, place, how)
            for number in range(2):
                backward(model, 10 + number)
                fail(model, 91 + number, place, how)
        backward(model, rank)

    return one


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize(("place", "how"), WAYS_TO_FAIL)
def test_after_a_pass_that_failed_on_every_rank_the_next_step_works(
    place: int, how: str, wrap: Wrapping
):
    """Whether that was the first one, or came after good ones."""
    one = passes_around_failures(place, how)
    (found,) = wrap.gradients(RANKS, build, one, fsdp=LAYERS)
    assert_gradients(found, RANKS, build, one)


@pytest.mark.checkered
@every_fsdp
@pytest.mark.parametrize("how", ["forward", "backward", "interrupt"])
def test_so_it_does_where_groups_are_inside_each_other(how: str, wrap: Wrapping):
    one = passes_around_failures(0, how)
    (found,) = wrap.gradients(RANKS, build, one, fsdp=NESTED)
    assert_gradients(found, RANKS, build, one)


@pytest.mark.checkered
@every_ddp
@pytest.mark.parametrize(("place", "how"), WAYS_TO_FAIL[6:])
def test_the_next_steps_send_as_many_messages_as_they_would_have(
    place: int, how: str, wrap: Wrapping
):
    def messages(backend: Backend, model: nn.Module, fails: bool) -> list[int]:
        ddp = wrap(model, backend)
        backward(ddp, 0)
        if fails:
            fail(ddp, 99, place, how)
        watched, found = Watched(backend), []
        for number in range(3):
            ddp.zero_grad()
            watched.clear()
            backward(ddp, 10 * number + backend.rank)
            found.append(len(watched.sizes()))
        return found

    after, undisturbed = (
        wrap.on_ranks(RANKS, build, lambda m, b, fails=fails: messages(b, m, fails))
        for fails in (True, False)
    )
    assert after == undisturbed


@every_wrapping
def test_a_batch_may_be_tried_again_while_its_error_is_being_handled(wrap: Wrapping):
    """An error that was there before a pass is none of the pass."""

    def one(model: Any, rank: int) -> None:
        if not isinstance(model, (DDP, FSDP)):
            return backward(model, rank)
        model.module.layers[1].how = "forward"
        try:
            backward(model, 99)
        except ArithmeticError:
            model.module.layers[1].how = ""
            model.zero_grad()
            backward(model, rank)
            if isinstance(model, FSDP):
                with torch.no_grad():
                    model(noise(4, 6))
                for group in model._runtime.groups:
                    assert group.state.now == "SHARDED"

    (found,) = wrap.gradients(RANKS, build, one)
    assert_gradients(found, RANKS, build, one)


@every_ddp
def test_a_backward_pass_that_failed_may_be_retried_without_another_forward_pass(wrap: Wrapping):
    def one(model: Any, rank: int) -> None:
        output = model(noise(4, 6, seed=rank))
        loss, bad = output.pow(2).sum(), Fails.apply(output).sum()
        with pytest.raises(ArithmeticError):
            bad.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()

    (found,) = wrap.gradients(2, build, one)
    assert_gradients(found, 2, build, one)


@every_wrapping
def test_ranks_stay_equal_after_passes_that_failed(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend, fsdp=LAYERS)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        for number, place in enumerate([3, None, 2, 1, None, 0, None]):
            optimizer.zero_grad()
            if place is not None:
                fail(wrapped, number, place, "backward, input")
            else:
                backward(wrapped, 10 * number + backend.rank)
                optimizer.step()
        return wrap.state(wrapped)

    assert_same_bits(wrap.on_ranks(RANKS, build, body))


# On one rank -----------------------------------------------------------------------------------


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_a_rank_that_fails_alone_ends_the_others_and_its_own_error_is_the_cause(
    how: str, wrap: Wrapping
):
    def body(model: Any, backend: Backend) -> None:
        wrapped = wrap(model, backend, fsdp=LAYERS)
        backward(wrapped, 0)
        if backend.rank == 1:
            model.layers[2].how = how
        backward(wrapped, 1)
        torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
        backward(wrapped, 2)

    with pytest.raises(ArithmeticError, match="a bad batch"):
        wrap.on_ranks(RANKS, build, body)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_so_in_any_order_of_the_ranks(seed: int):
    def run(backend: Backend) -> None:
        ddp = DDP(build(), backend)
        if backend.rank == 1:
            ddp.module.layers[2].how = "backward"
        backward(ddp, 0)

    with pytest.raises(ArithmeticError, match="a bad batch"):
        simulate(run, RANKS, seed)


BY_MESSAGES = [wrap for wrap in WRAPPINGS if wrap.cluster is MESSAGES]
GATHERS_OR_AVERAGES = [
    wrap for wrap in BY_MESSAGES if wrap.kind is DDP or wrap is FULL_SHARD_BY_MESSAGES
]


@every_wrapping(among=GATHERS_OR_AVERAGES)
def test_the_others_are_told_who_is_gone_and_in_what_they_waited_for_it(wrap: Wrapping):
    def body(model: Any, backend: Backend) -> BaseException | None:
        wrapped = wrap(model, backend)
        backward(wrapped, 0)
        token = torch.zeros(1)
        if backend.rank == 1:
            backend.recv(token, 0)
            backend.recv(token, 2)
            backend.abort()
            return None
        backend.send(token, 1)
        return outcome_of(lambda: [backward(wrapped, number) for number in range(3)])

    waited_in = "DDP's pass" if wrap.kind is DDP else "FSDP gathers"
    for rank, error in enumerate(wrap.on_ranks(RANKS, build, body)):
        if rank != 1:
            assert isinstance(error, PeerLostError)
            for words in (f"rank {rank}", "rank 1", waited_in):
                assert words in str(error)


@every_wrapping(among=[wrap for wrap in BY_MESSAGES if wrap.kind is FSDP])
def test_a_rank_that_leaves_a_pass_out_is_told_that_it_is_out_of_step(wrap: Wrapping):
    def body(model: Any, backend: Backend) -> BaseException | None:
        fsdp = wrap(model, backend)
        backward(fsdp, 0)
        if backend.rank == 1:
            with torch.no_grad():
                fsdp(noise(4, 6))

        def go_on() -> None:
            for number in range(3):
                backward(fsdp, number)
                torch.optim.SGD(fsdp.parameters(), lr=0.1).step()

        error = outcome_of(go_on)
        return error or outcome_of(backend.barrier)

    for error in wrap.on_ranks(2, build, body):
        assert isinstance(error, DesyncError)
        assert "FSDP" in str(error)


@pytest.mark.parametrize("place", [3, 2, 1])
def test_a_rank_that_skips_a_failed_batch_by_itself_is_told_that_it_is_out_of_step(place: int):
    """Buckets of one pass are never averaged with those of another, though their sizes agree."""

    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(build(), backend, bucket_size=168, broadcast_buffers=False)
        backward(ddp, 0)
        backend.barrier()
        if backend.rank == 1:
            fail(ddp, 1, place, "backward, input")
        else:
            error = outcome_of(lambda: backward(ddp, 1))
            if error is not None:
                return error
        return outcome_of(lambda: backward(ddp, 2))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)


@pytest.mark.parametrize("how", ["backward, output", "backward, input"])
@pytest.mark.parametrize("bucket_size", [168, 1 << 20])
def test_ranks_that_fail_at_different_places_never_mix_their_gradients(how: str, bucket_size: int):
    """Also if one of them fails before any gradient, and the other when all are on their way."""

    def run(backend: Backend) -> BaseException | Gradients:
        ddp = DDP(build(), backend, bucket_size=bucket_size, broadcast_buffers=False)
        backward(ddp, 0)
        backend.barrier()
        place, at = (3, how) if backend.rank else (0, "backward, input")
        error = outcome_of(lambda: fail(ddp, 1, place, at))
        error = error or outcome_of(lambda: backward(ddp, 2))
        return error or gradients(ddp)

    model = build()
    backward(model, 2)
    for found in simulate(run, 2):
        if isinstance(found, BaseException):
            assert isinstance(found, DesyncError)
        else:
            assert_close(found, gradients(model))


@pytest.mark.parametrize("bucket_size", [168, 1 << 20])
def test_a_rank_that_averaged_what_another_gave_up_is_told_so(bucket_size: int):
    """Who fails before backward begins, and goes on, meets what the other had on its way."""

    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(build(), backend, bucket_size=bucket_size, broadcast_buffers=False)
        backward(ddp, 0)
        backend.barrier()
        place, at = (3, "forward") if backend.rank else (0, "backward, input")
        error = outcome_of(lambda: fail(ddp, 1, place, at))
        return error or outcome_of(lambda: [backward(ddp, number) for number in (2, 3, 4)])

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "after 1 that failed" in str(error)
        assert str(error).count("a backward pass of it failed or was left out") == 1


def test_a_batch_that_fails_in_one_ranks_forward_pass_may_be_tried_again_there():
    def one(model: Any, rank: int) -> None:
        if isinstance(model, DDP) and rank == 1:
            fail(model, 99, 2, "forward")
        backward(model, rank)

    def run(backend: Backend) -> Gradients:
        ddp = DDP(build(), backend)
        one(ddp, backend.rank)
        return gradients(ddp)

    expected = naive_gradients(build, 2, one)
    for found in simulate(run, 2):
        assert_close(found, expected)


# What others do, and what is refused -----------------------------------------------------------


@pytest.mark.checkered
@every_wrapping
@pytest.mark.parametrize("outermost", [True, False])
def test_hooks_of_others_may_fail_and_may_use_parameters(outermost: bool, wrap: Wrapping):
    """Such as `weight_norm`'s, which computes a weight out of two before each forward pass."""

    def body(model: Any, backend: Backend) -> Any:
        fails = [True, True]
        shapes = []

        def before(module: Any, args: Any) -> None:
            shapes.append(model.layers[0].one.weight.shape)
            if fails:
                fails.pop()
                raise ArithmeticError("a hook")

        (model if outermost else model.layers).register_forward_pre_hook(before)
        wrapped = wrap(model, backend)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                wrapped(noise(4, 6))
        backward(wrapped, backend.rank)
        assert shapes[-1] == (6, 6)
        return gradient_pieces(wrapped)

    found = joined(wrap.on_ranks(RANKS, build, body))
    assert_close(found, naive_gradients(build, RANKS, backward))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@every_wrapping
def test_weight_norm_old_and_new(wrap: Wrapping):
    def normed() -> nn.Module:
        old, new = torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm
        return nn.Sequential(old(nn.Linear(6, 5)), nn.Tanh(), new(nn.Linear(5, 3)))

    (found,) = wrap.gradients(RANKS, lambda: seeded(normed), backward)
    assert_gradients(found, RANKS, lambda: seeded(normed), backward)


@every_ddp
@pytest.mark.parametrize("how", ["backward", "no_sync and backward", "sync_gradients"])
def test_sparse_gradients_are_refused_by_name(how: str, wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        ddp = wrap(model, backend)
        backend.barrier()  # who is told of a failure while it builds DDP fails there

        def step() -> None:
            ddp(torch.tensor([backend.rank])).sum().backward()

        if how == "backward":
            return outcome_of(step)
        with ddp.no_sync():
            step()
        return outcome_of(ddp.sync_gradients if how == "sync_gradients" else step)

    class Table(nn.Embedding):
        """Nothing tells before the first pass that its gradient is sparse."""

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.embedding(input, self.weight, sparse=True)

    def sparse() -> nn.Module:
        return nn.Sequential(Table(5, 2), nn.Linear(2, 1))

    for error in wrap.on_ranks(2, sparse, body):
        assert isinstance(error, UnsupportedOperationError)
        assert "0.weight" in str(error)
        assert "sparse" in str(error)


# Several, and none any more --------------------------------------------------------------------


PARTS = (DDP, Reducer, FSDP, FsdpRuntime, FlatParameter, ForwardCall, UnshardedParameter)


def parts_alive() -> set[int]:
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) in PARTS}


@every_wrapping(among=[*DDPS[:1], *FSDPS[:3]])
def test_dropping_one_leaves_nothing_behind(wrap: Wrapping):
    """So a module may be wrapped again, if it is whole again."""
    unwrapped = wrap.kind is FSDP and wrap is not FULL_SHARD_BY_MESSAGES
    again = wrap.kind is DDP or unwrapped

    def body(model: nn.Module, backend: Backend) -> None:
        for _ in range(2 if again else 1):
            wrapped = wrap(model, backend)
            optimizer = torch.optim.Adam(wrapped.parameters())
            backward(wrapped, 0)
            optimizer.step()
            wrapped(noise(4, 6))
            if unwrapped:
                wrapped.unwrap()
            del wrapped, optimizer

    before = parts_alive()
    wrap.on_ranks(2, build, body)
    assert parts_alive() <= before


@every_wrapping
def test_several_at_a_time_on_one_backend_do_not_disturb_each_other(wrap: Wrapping):
    """As a generator and a discriminator are: one pass goes through both."""

    def play(first: nn.Module, second: nn.Module, rank: int) -> None:
        second(first(noise(4, 6, seed=rank))).pow(2).sum().backward()
        first(second(noise(4, 6, seed=rank))).sum().backward()

    def body(model: nn.Module, backend: Backend) -> Any:
        first, second = (wrap(model.layers[number], backend) for number in range(2))
        play(first, second, backend.rank)
        return gradient_pieces(first), gradient_pieces(second)

    ranks = wrap.on_ranks(2, build, body)
    plain = [build() for _ in range(2)]
    for rank, model in enumerate(plain):
        play(model.layers[0], model.layers[1], rank)
    for number in range(2):
        layers = [dict(model.layers[number].named_parameters()) for model in plain]
        wanted = {name: (p.grad + layers[1][name].grad) / 2 for name, p in layers[0].items()}
        assert_close(joined([found[number] for found in ranks]), wanted)

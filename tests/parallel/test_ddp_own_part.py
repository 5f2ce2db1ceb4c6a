"""DDP in shared memory: of what no other rank reads, gradients stay where autograd has put them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from clusters import SharedMemory
from torch import Tensor, nn

from phalanx import DDP, Backend
from phalanx.collectives.pieces import join
from phalanx.parallel import reducer

RANKS = 3


@pytest.fixture(autouse=True, params=["small", "large"])
def buckets_are(
    request: pytest.FixtureRequest,
    thresholds: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take the way of small, or of large tensors."""
    monkeypatch.setattr(reducer, "LARGE", 0)
    if request.param == "large":
        thresholds(small=0, block=256)


with torch.random.fork_rng():
    torch.manual_seed(0)  # the same weights, whatever other files have drawn
    LAYERS = nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 1)
CONVOLUTION = nn.Conv2d(3, 4, 3)


def model() -> nn.Sequential:
    return deepcopy(nn.Sequential(*LAYERS))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))


def expected(passes: int = 1) -> list[Tensor]:
    """The gradients of one process that has all samples."""
    plain = model()
    for _ in range(passes):
        plain(torch.cat([batch(rank) for rank in range(RANKS)])).mean().backward()
    return gradients(plain)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.allclose, left, right))


def test_gradients_are_those_of_one_process() -> None:
    def run(backend: Backend) -> bool:
        ddp = DDP(model(), backend, bucket_size=400)  # several buckets
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(backend.rank)).mean().backward()
        return same(gradients(ddp), expected())

    assert SharedMemory().run(run, RANKS) == [True] * RANKS


def test_a_gradient_is_copied_but_for_this_ranks_slice_of_the_bucket() -> None:
    """Of 12 elements rank 1 reduces those from 4 to 8: of the first tensor 1, of the second 3."""

    def run(backend: Backend) -> tuple[list[float], dict[int, list[float]]]:
        tensors = [torch.zeros(5, requires_grad=True), torch.zeros(7, requires_grad=True)]
        bucket = reducer.BackwardBucket(tensors, backend, None, in_pieces=True)
        bucket.flat.fill_(-1)
        for tensor in tensors:
            tensor.grad = torch.arange(1.0, 1 + tensor.numel())
            bucket.put(tensor)
        own = {element: values.tolist() for element, values in bucket.pieces.items()}
        copied = bucket.flat.tolist()
        join(bucket.flat, tuple(bucket.pieces.items()))
        assert bucket.flat.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]
        return copied, own

    copied, own = SharedMemory().run(run, RANKS)[1]
    assert copied == [1, 2, 3, 4, -1, -1, -1, -1, 4, 5, 6, 7]
    assert own == {4: [5], 5: [1, 2, 3]}


def test_gradients_of_several_passes_add_up_before_they_are_averaged() -> None:
    def run(backend: Backend) -> bool:
        ddp = DDP(model(), backend)
        with ddp.no_sync():
            ddp(batch(backend.rank)).mean().backward()
        ddp(batch(backend.rank)).mean().backward()
        return same(gradients(ddp), expected(2))

    assert SharedMemory().run(run, RANKS) == [True] * RANKS


def test_one_that_has_no_gradient_gives_zeros() -> None:
    """Rank 0 uses one half of the model, the others use both."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.never = (nn.Linear(7, 1) for _ in range(3))

        def forward(self, x: Tensor, both: bool) -> Tensor:
            result: Tensor = self.first(x) + self.second(x) if both else self.first(x)
            return result

    def run(backend: Backend) -> tuple[Tensor, bool]:
        ddp = DDP(Halves(), backend, find_unused_parameters=True)
        ddp(batch(backend.rank), backend.rank != 0).mean().backward()
        module = ddp.module
        assert module.second.weight.grad is not None
        return module.second.weight.grad, module.never.weight.grad is None

    mean = sum(batch(rank).mean(0) for rank in (1, 2)) / RANKS
    for second, never_is_none in SharedMemory().run(run, RANKS):
        assert torch.allclose(second, mean)
        assert never_is_none


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_is_kept_for_a_second_derivative_keeps_its_values() -> None:
    def run(backend: Backend) -> bool:
        ddp = DDP(model(), backend)
        kept: list[Tensor] = []
        ddp.module[0].weight.register_hook(kept.append)  # type: ignore[no-untyped-call]
        ddp(batch(backend.rank)).mean().backward(create_graph=True)
        alone = model()
        alone(batch(backend.rank)).mean().backward()
        assert alone[0].weight.grad is not None
        return torch.allclose(kept[0], alone[0].weight.grad) and same(gradients(ddp), expected())

    assert SharedMemory().run(run, RANKS) == [True] * RANKS


def test_gradients_of_other_strides_on_one_rank_are_averaged_by_their_elements() -> None:
    """A convolution in channels_last has gradients in that order of memory."""

    def run(backend: Backend) -> Tensor:
        ddp = DDP(deepcopy(CONVOLUTION), backend)
        images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(backend.rank))
        if backend.rank == 1:
            ddp.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            images = images.to(memory_format=torch.channels_last)
        ddp(images).sum().backward()
        assert ddp.module.weight.grad is not None
        return ddp.module.weight.grad.contiguous()

    plain = deepcopy(CONVOLUTION)
    for rank in range(RANKS):
        images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
        (plain(images).sum() / RANKS).backward()
    assert plain.weight.grad is not None
    for gradient in SharedMemory().run(run, RANKS):
        assert torch.allclose(gradient, plain.weight.grad, atol=1e-5)


def test_a_pass_that_was_cut_short_leaves_this_ranks_own_gradients() -> None:
    def run(backend: Backend) -> bool:
        ddp = DDP(model(), backend)
        handle = ddp.module[2].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ddp(batch(backend.rank)).mean().backward()
        handle.remove()
        last = ddp.module[4].weight
        with torch.no_grad():
            ddp(batch(backend.rank))
        alone = model()
        alone(batch(backend.rank)).mean().backward()
        assert last.grad is not None
        assert alone[4].weight.grad is not None
        assert torch.allclose(last.grad, alone[4].weight.grad)
        ddp.zero_grad()
        ddp(batch(backend.rank)).mean().backward()
        return same(gradients(ddp), expected())

    assert SharedMemory().run(run, RANKS) == [True] * RANKS

"""What error feedback has left over is in a checkpoint, and resumes on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phalanx import (
    DDP,
    Backend,
    ErrorFeedback,
    PowerSGD,
    Quantized,
    TopK,
    load_checkpoint,
    save_checkpoint,
    simulate,
)
from phalanx.compression.error_feedback import total_residual

KINDS = {
    "top-k": lambda: ErrorFeedback(TopK(0.1)),
    "1 bit": lambda: ErrorFeedback(Quantized(1, block=8)),
    "PowerSGD": lambda: ErrorFeedback(PowerSGD(1)),
}


def model_of(backend: Backend, kind: str | None, *, nested: bool) -> tuple[nn.Module, DDP]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    ddp = DDP(plain, backend, bucket_size=80, compression=KINDS[kind]() if kind else None)
    return (nn.ModuleDict({"net": ddp}) if nested else ddp), ddp


def train(ddp: DDP, steps: range) -> dict[str, Tensor]:
    for step in steps:
        draw = torch.Generator().manual_seed(100 * step + ddp.backend.rank)
        ddp.zero_grad()
        ddp(torch.randn(4, 6, generator=draw)).pow(2).sum().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.sub_(0.01 * parameter.grad)
    return {name: value.clone() for name, value in ddp.state_dict().items()}


def lacks(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    own = [
        {key.split(".", 1)[1]: value for key, value in state.items() if "compression@" in key}
        for state in states
    ]
    return total_residual(own, len(own))


@pytest.mark.checkered
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(kind: str, nested: bool, tmp_path: Path):
    def whole(backend: Backend):
        return train(model_of(backend, kind, nested=nested)[1], range(4))

    def save(backend: Backend) -> None:
        model, ddp = model_of(backend, kind, nested=nested)
        train(ddp, range(2))
        save_checkpoint(tmp_path, model=model, step=2)

    def resume(backend: Backend):
        model, ddp = model_of(backend, kind, nested=nested)
        load_checkpoint(tmp_path, model=model)
        return train(ddp, range(2, 4))

    simulate(save, 2)
    for one, other in zip(simulate(whole, 2), simulate(resume, 2), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.checkered
@pytest.mark.parametrize(("p", "q"), [(3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_has_as_much_left_over(kind: str, p: int, q: int, tmp_path: Path):
    def save(backend: Backend):
        ddp = model_of(backend, kind, nested=False)[1]
        state = train(ddp, range(2))
        save_checkpoint(tmp_path, model=ddp, step=2)
        return state

    def load(backend: Backend):
        ddp = model_of(backend, kind, nested=False)[1]
        load_checkpoint(tmp_path, model=ddp)
        state = {name: value.clone() for name, value in ddp.state_dict().items()}
        train(ddp, range(2, 3))
        return state

    before, after = lacks(list(simulate(save, p))), lacks(list(simulate(load, q)))
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=2**-24, atol=0)


def test_a_model_without_compression_loads_the_rest(tmp_path: Path):
    simulate(
        lambda b: save_checkpoint(tmp_path, model=model_of(b, "top-k", nested=False)[0], step=0), 2
    )

    def load(backend: Backend) -> None:
        load_checkpoint(tmp_path, model=model_of(backend, None, nested=False)[0])

    simulate(load, 2)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    load_checkpoint(tmp_path, model=plain)

"""A gradient penalty, as in WGAN-GP: gradients of gradients under DDP.

phalanx run -n 2 examples/recipes/gradient_penalty.py
"""

import torch
from torch import Tensor, nn

import phalanx

INPUTS = torch.rand(21, 4, generator=torch.Generator().manual_seed(0))


def sum_of_losses(critic: nn.Module, x: Tensor) -> Tensor:
    """The scores, and ten times the squares of (slope - 1)."""
    x = x.clone().requires_grad_()
    scores: Tensor = critic(x)
    (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)  # sends nothing
    penalties: Tensor = (slopes.norm(dim=1) - 1).square()
    return scores.sum() + 10 * penalties.sum()


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    whole = sum_of_losses(plain, INPUTS) / len(INPUTS)  # one process
    expected = torch.autograd.grad(whole, list(plain.parameters()))

    model = phalanx.DDP(plain, backend)
    mine = INPUTS[backend.rank :: backend.world_size]
    with model.step(len(mine)) as step:
        step.backward(sum_of_losses(model, mine))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    backend.print(f"loss with penalty {step.loss:.4f}, gradients as in one process")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)

"""torch.compile: the module's forward and backward are compiled, and DDP averages as before.

phalanx run -n 2 examples/recipes/compiled.py      needs a C++ compiler, and some seconds
"""

import copy

import torch
from torch import Tensor, nn

import phalanx

INPUTS = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).square().sum(1)


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    plain = Squares()
    module = copy.deepcopy(plain)
    module.compile(fullgraph=True)  # in place, before it is wrapped: the names stay
    model = phalanx.DDP(module, backend)
    mine = INPUTS[backend.rank :: backend.world_size]
    model(mine).mean().backward()
    (expected,) = torch.autograd.grad(plain(INPUTS).mean(), plain.linear.weight)
    torch.testing.assert_close(module.linear.weight.grad, expected)
    backend.print(f"compiled {', '.join(model.state_dict())}: gradients as in one process")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)

"""LoRA with peft, under DDP and under FSDP: only the adapters are trained.

phalanx run -n 2 examples/recipes/lora.py      pip install peft
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import phalanx

INPUTS = torch.rand(24, 16, generator=torch.Generator().manual_seed(0))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"]))  # type: ignore[no-any-return]


def outputs_after(model: nn.Module, x: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return torch.cat([model(INPUTS)])


def main(backend: phalanx.Backend) -> None:
    mine, expected = INPUTS[backend.rank :: backend.world_size], outputs_after(adapted(), INPUTS)
    for wrap in (phalanx.DDP, phalanx.FSDP):
        found = outputs_after(wrap(adapted(), backend), mine)
        torch.testing.assert_close(found, expected)
        backend.print(f"{wrap.__name__}: outputs as in one process")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)

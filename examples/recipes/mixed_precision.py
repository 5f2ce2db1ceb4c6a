"""Mixed precision: FSDP computes in float16; if a gradient overflows, all ranks skip the step.

phalanx run -n 2 examples/recipes/mixed_precision.py
"""

import torch
from torch import nn

import phalanx


def main(backend: phalanx.Backend) -> None:
    torch.manual_seed(0)
    model = phalanx.FSDP(nn.Linear(4, 1), backend, mixed_precision=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = phalanx.GradScaler(backend, init_scale=1024.0)
    skipped = []
    for number in range(8):
        x = torch.rand(16, 4)
        if number == 3 and backend.rank == backend.world_size - 1:
            x *= 1e5  # more than float16 can hold, on one rank
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        phalanx.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(number)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    assert phalanx.all_gather_object(skipped, backend) == [[3]] * backend.world_size
    backend.print(f"all ranks skipped step {skipped}; the loss scale is {scaler.get_scale():g}")


if __name__ == "__main__":
    with phalanx.init() as backend:
        main(backend)

"""Pipeline parallelism: each rank trains some layers of a network that learns to add angles.

phalanx run -n 4 examples/pipeline.py
phalanx run -n 2 examples/pipeline.py --schedule zb_v
phalanx run -n 2 examples/pipeline.py --steps 8 --width 1024       # a bubble nearer to theory
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import phalanx as px


def build_layers(width: int, depth: int = 12) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    blocks[0].insert(0, nn.Linear(4, width))
    return nn.Sequential(*blocks[:-1], blocks[-1].append(nn.Linear(width, 2)))


def draw_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(rows, 2, generator=torch.Generator().manual_seed(step)) * 2 * math.pi
    total = angles.sum(1, keepdim=True)
    return torch.cat([angles.sin(), angles.cos()], 1), torch.cat([total.sin(), total.cos()], 1)


def train(
    backend: px.Backend, steps: int, micro_batches: int, schedule: str, width: int = 64
) -> list[float]:
    torch.manual_seed(0)  # all ranks build all layers, and keep their own
    config = px.PipelineParallelConfig(backend.world_size, micro_batches, schedule)
    pipeline = px.Pipeline(build_layers(width), backend, config)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=2e-3 * 64 / width)
    rows, losses = 4 * width, []
    for step in range(steps):
        optimizer.zero_grad()
        loss = pipeline.train_step(*draw_batch(step, rows), nn.functional.mse_loss)
        optimizer.step()
        losses.append(loss.item())
        if backend.rank == 0 and (step + 1) % max(1, steps // 4) == 0:
            print(f"step {step + 1}  loss {loss:.4f}")
    held_out = pipeline.evaluate(*draw_batch(-1, rows), nn.functional.mse_loss)
    bubble = pipeline.pipeline_bubble()
    if backend.rank == 0:
        print(f"held-out loss {held_out:.4f}  {bubble}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--width", type=int, default=256)
    with px.init() as backend:
        train(backend, **vars(parser.parse_args()))

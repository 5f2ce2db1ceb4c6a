"""A transformer block whose heads, features and words are shared by all ranks.

phalanx run -n 4 examples/tensor_parallel.py
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import phalanx as px
from phalanx.tensor import ColumnStyle, RowStyle, full_state_dict, parallel_cross_entropy

WIDTH, HEAD_WIDTH, WORDS = 32, 4, 50
PLAN: dict[str, Any] = {"embed": "embedding", "up": "column", "down": "row", "head": "column"}
PLAN["qkv"] = ColumnStyle(parts=(WIDTH,) * 3, unit=HEAD_WIDTH)
PLAN["mix"] = RowStyle(unit=HEAD_WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        heads = self.qkv(x).unflatten(-1, (3, -1, HEAD_WIDTH))  # -1: as many as there are here
        q, k, v = heads.transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return cast(Tensor, self.head(x + self.down(F.gelu(self.up(x)))))


def train(backend: px.Backend, steps: int = 30) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)  # the same model and text on every rank
    model, text = Model(), torch.randint(WORDS, (8, 17))
    px.parallelize(model, backend, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):  # a rank has the logits of its own words, and no rank has all
        logits, targets = model(text[:, :-1]), text[:, 1:]
        loss = parallel_cross_entropy(logits, backend, targets, num_classes=WORDS)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    mine = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {backend.rank}: {mine} numbers, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses, full_state_dict(model)


if __name__ == "__main__":
    with px.init() as backend:
        train(backend)

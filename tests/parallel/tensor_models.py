"""A small transformer, the plans that make it parallel, and ways to compare it with the plain one.

The model is written without a thought of ranks, but for one thing: how many heads there are it
reads off the size of what it gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ddp_models import seeded
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.tensor import ColumnStyle, EmbeddingStyle, RowStyle, full_state_dict

VOCABULARY = 13
HEADS = 8
HEAD_WIDTH = 2


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        width = heads * HEAD_WIDTH
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """tokens [batch, length] -> logits [batch, length, VOCABULARY]."""

    def __init__(self, heads: int = HEADS, layers: int = 1, *, tied: bool = False) -> None:
        super().__init__()
        width = heads * HEAD_WIDTH
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NormedHeads(nn.Module):
    """Attention whose queries and keys are normalized, head by head (Henry et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.LayerNorm(4)
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.mix(seen.transpose(1, 2).flatten(2))


def transformer(heads: int = HEADS, layers: int = 1, *, tied: bool = False) -> Transformer:
    model = seeded(lambda: Transformer(heads, layers, tied=tied))
    assert isinstance(model, Transformer)
    return model


def plan_for(heads: int = HEADS, *, sequence_dim: int | None = None) -> dict[str, Any]:
    """Everything cut that can be; along the sequence what is left, if there is a dim for it."""
    width, along = heads * HEAD_WIDTH, {"sequence_dim": sequence_dim}
    plan: dict[str, Any] = {
        "embed": EmbeddingStyle(**along),
        "blocks.*.qkv": ColumnStyle(parts=(width,) * 3, unit=HEAD_WIDTH, **along),
        "blocks.*.mix": RowStyle(unit=HEAD_WIDTH, **along),
        "blocks.*.up": ColumnStyle(**along),
        "blocks.*.down": RowStyle(**along),
        "head": ColumnStyle(**along),
    }
    if sequence_dim is not None:
        plan["*norm*"] = "sequence_norm"
    return plan


def batch(rows: int = 4, length: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (rows, length + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, rows: int = 4
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps of one process, and the parameters afterwards."""
    losses = []
    for step in range(steps):
        inputs, targets = batch(rows, seed=step)
        loss = plain_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    """All gradients as the plain model has them: what `full_state_dict` gives for them."""
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for name, p in module.named_parameters():
            assert p.grad is not None, name
            p.copy_(p.grad)
        found = {name: value.clone() for name, value in full_state_dict(module).items()}
        for name, p in module.named_parameters():
            p.copy_(values[name])
    return found


def plain_gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.clone()
        for name, p in module.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }


def assert_all_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )

"""A small GPT: bytes in, the next byte out.

    byte -> embedding -> [ + attention(norm(x)) -> + mlp(norm(x)) ] x layers
         -> norm -> scores of 256 bytes (the embedding, transposed)

Pre-norm transformer with tied embeddings (Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners"); queries and keys are turned by their position (Su et al. 2021, "RoFormer").
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

BYTES = 256


def turns_of(length: int, width: int) -> Tensor:
    """The angles by which positions are turned: [length, width / 2], slower and slower."""
    speeds = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.arange(length).unsqueeze(1) * speeds


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of numbers, so that products depend on how far apart two positions are."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """One layer: every position looks back at the earlier ones, then thinks for itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        x = x + self.attention(self.attention_norm(x), turns)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        return cast(Tensor, x + self.mlp_out(hidden))

    def attention(self, x: Tensor, turns: Tensor) -> Tensor:
        """Causal self-attention with several heads."""
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, turns), rotate(key, turns)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.attention_out(seen.transpose(1, 2).reshape(batch, length, width)))


class GPT(nn.Module):
    """Scores of the next byte at every position of up to `context` bytes."""

    def __init__(self, *, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"a width of {width} cannot be split over {heads} heads of even width")
        self.context = context
        self.head_width = width // heads
        self.byte_embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # what is added to the stream: smaller, the more layers add
                adds = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats a byte. Both [batch, length <= context], int64."""
        return F.cross_entropy(self.scores(inputs).flatten(0, 1), targets.flatten())

    def scores(self, inputs: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, 256], before the softmax."""
        turns = turns_of(inputs.shape[1], self.head_width).to(inputs.device)
        x = self.byte_embedding(inputs)
        for block in self.blocks:
            x = block(x, turns)
        return cast(Tensor, self.norm(x) @ self.byte_embedding.weight.T)


@torch.no_grad()
def write_on(model: GPT, prompt: bytes, length: int, *, temperature: float, seed: int) -> bytes:
    """`prompt` and `length` bytes that the model adds, drawn at `temperature` (0: the likeliest).

    The same seed writes the same text. The caller's random state is not touched.
    """
    device = model.byte_embedding.weight.device
    random = torch.Generator().manual_seed(seed)
    text = list(prompt or b"\n")
    for _ in range(length):
        seen = torch.tensor([text[-model.context :]], device=device)
        scores = model.scores(seen)[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            chances = torch.softmax(scores / temperature, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=random)))
    return bytes(text if prompt else text[1:])

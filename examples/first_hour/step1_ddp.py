"""Train a small transformer with DDP: each rank has the model, and a part of every batch.

phalanx run -n 2 examples/first_hour/step1_ddp.py
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import phalanx


class Classifier(nn.Module):
    """A transformer that says which of ten tokens comes most often in a sequence."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        return scores


def sequences(count: int, seed: int) -> TensorDataset:
    """Random sequences of 16 tokens, and the most frequent token of each."""
    tokens = torch.randint(10, (count, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, tokens.mode(dim=1).values)


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, backend: phalanx.Backend) -> float:
    """Return the mean loss over all sequences."""
    device, size = backend.device, len(data)
    sampler = phalanx.BatchSampler.evaluation(size, backend, batch_size=128)
    loader = DataLoader(data, batch_sampler=sampler)
    model.eval()
    losses = [cross_entropy(model(x.to(device)), y.to(device), reduction="none") for x, y in loader]
    model.train()
    return phalanx.mean(torch.cat(losses), backend)


def train(args: argparse.Namespace, backend: phalanx.Backend) -> list[tuple[float, float]]:
    """Train; return the last batch's loss and the held-out loss of each epoch."""
    device = backend.device
    data, held_out = sequences(1000, seed=1), sequences(301, seed=2)
    sampler = phalanx.BatchSampler(len(data), backend, batch_size=64, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)
    model = phalanx.DDP(Classifier().to(device), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    history, best = [], float("inf")
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        mean_loss = phalanx.mean(loss.item(), backend)
        score = evaluate(model, held_out, backend)
        history.append((mean_loss, score))
        backend.print(f"epoch {epoch}  loss {mean_loss:.3f}  held-out {score:.3f}")
        if score < best:
            best = score
            if backend.rank == 0:
                torch.save(model.state_dict(), args.out / "best.pt")
    return history


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/first_hour"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    with phalanx.init() as backend:
        train(options(), backend)

"""Train with FSDP: each rank has a part of the parameters, gradients and optimizer state.

phalanx run -n 2 examples/first_hour/step4_fsdp.py
"""

import argparse
import sys
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


def train(
    args: argparse.Namespace, backend: phalanx.Backend, notice: phalanx.Notice
) -> list[tuple[float, float]]:
    """Train; return the last batch's loss and the held-out loss of each epoch."""
    device = backend.device
    data, held_out = sequences(1000, seed=1), sequences(301, seed=2)
    sampler = phalanx.BatchSampler(len(data), backend, batch_size=64, seed=0)
    loader = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)
    plain = Classifier().to(device)
    model = phalanx.FSDP(plain, backend, unit=nn.TransformerEncoderLayer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    history, best = [], float("inf")

    def save(name: str) -> None:
        phalanx.save_checkpoint(
            args.out / name,
            model=model,
            optimizer=optimizer,
            step=schedule.last_epoch,
            extra={"data": sampler.state_dict(), "rate": schedule.state_dict(), "best": best},
        )

    if args.resume:
        extra = phalanx.load_checkpoint(args.out / "last", model=model, optimizer=optimizer).extra
        sampler.load_state_dict(extra["data"])
        schedule.load_state_dict(extra["rate"])
        best = extra["best"]

    for epoch in range(sampler.epoch, args.epochs):
        for x, y in sampler.track(loader):
            parts = list(zip(x.split(args.rows), y.split(args.rows), strict=True))
            optimizer.zero_grad()
            with model.step(len(x), micro_batches=len(parts)) as step:
                for tokens, kinds in parts:
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                        scores = model(tokens.to(device))
                        losses = cross_entropy(scores, kinds.to(device), reduction="sum")
                    step.backward(losses)
            phalanx.clip_grad_norm_(model, 1.0)
            optimizer.step()
            schedule.step()
            if notice.given() and sampler.taken:  # told to leave, in the middle of an epoch
                break
        else:
            score = evaluate(model, held_out, backend)
            history.append((step.loss, score))
            backend.print(f"epoch {epoch}  loss {step.loss:.3f}  held-out {score:.3f}")
            if score < best:
                best = score
                save("best")
        save("last")
        if notice.given():
            break
    return history


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/first_hour"))
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    with phalanx.init() as backend, phalanx.Notice(backend) as notice:
        train(options(), backend, notice)
    sys.exit(notice.exit_code)

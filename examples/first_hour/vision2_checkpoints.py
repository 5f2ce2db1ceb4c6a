"""Save the model and its moving average; leave on SIGTERM; go on with any number of ranks.

phalanx run -n 2 examples/first_hour/vision2_checkpoints.py --epochs 1000
phalanx run -n 3 examples/first_hour/vision2_checkpoints.py --epochs 1000 --resume
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx


def convolution(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(before, after, 3, stride)
        self.second = convolution(after, after, 3)
        self.around = convolution(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.second(relu(self.first(x))) + self.around(x))


class ResNet(nn.Module):
    """A residual network that says which of four widths the stripes of an image have."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = convolution(1, width, 3)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, 4)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(relu(self.stem(images))).mean(dim=(2, 3)))
        return scores


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are mirrored, darker or brighter: each in another way in each epoch."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.epoch = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, kind = self.data[number]
        generator = torch.Generator().manual_seed(hash((self.epoch, number)))
        mirrored, light = torch.rand(2, generator=generator).tolist()
        return (image.flip(2) if mirrored < 0.5 else image) * (0.5 + light), kind


def images(count: int, seed: int) -> TensorDataset:
    """Images of 12 x 12 pixels with stripes in noise, and the kind of each: the stripes' width."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(4, (count,), generator=generator)
    starts = 6 * torch.rand(count, 1, 1, 1, generator=generator)
    stripes = ((torch.arange(12.0) + starts) * 6.28 / (3 + kinds.view(-1, 1, 1, 1))).sin()
    noise = torch.randn(count, 1, 12, 12, generator=generator)
    return TensorDataset(stripes + 0.5 * noise, kinds)


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, backend: phalanx.Backend) -> float:
    """Return the part of the images whose kind the model says."""
    device, size = backend.device, len(data)
    sampler = phalanx.BatchSampler.evaluation(size, backend, batch_size=128)
    loader = DataLoader(data, batch_sampler=sampler)
    model.eval()
    right = [model(x.to(device)).argmax(dim=1) == y.to(device) for x, y in loader]
    model.train()
    return phalanx.mean(torch.cat(right), backend)


def train(
    args: argparse.Namespace,
    backend: phalanx.Backend,
    notice: phalanx.Notice,
    scalars: phalanx.Scalars,
) -> list[tuple[float, float]]:
    """Train; return the last batch's loss and the held-out accuracy of each epoch."""
    device = backend.device
    data, held_out = Augmented(images(340, seed=1)), images(301, seed=2)
    sampler = phalanx.BatchSampler(len(data), backend, batch_size=32, seed=0)
    loader = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)
    plain = phalanx.convert_sync_batchnorm(ResNet().to(device), backend)
    model = phalanx.DDP(plain, backend)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
    scaler = phalanx.GradScaler(backend, device.type, enabled=args.half)
    history, best = [], 0.0
    console = Console(stderr=True, quiet=backend.rank > 0)
    both = nn.ModuleDict({"model": model, "average": average})

    if args.resume:
        extra = phalanx.load_checkpoint(args.out / "last", model=both, optimizer=optimizer).extra
        sampler.load_state_dict(extra["data"])
        schedule.load_state_dict(extra["rate"])
        scaler.load_state_dict(extra["scale"])
        best = extra["best"]

    for epoch in range(sampler.epoch, args.epochs):
        data.epoch = epoch
        left = len(loader) - sampler.taken // 32
        for x, y in track(sampler.track(loader), f"epoch {epoch}", left, console=console):
            optimizer.zero_grad()
            with model.step(len(x)) as step:
                with torch.autocast(device.type, torch.float16, enabled=args.half):
                    losses = cross_entropy(model(x.to(device)), y.to(device), reduction="sum")
                step.backward(scaler.scale(losses))
            loss = step.loss / scaler.get_scale()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update_parameters(model)
            scalars.log(schedule.last_epoch, loss=loss, rate=schedule.get_last_lr()[0])
            if notice.given() and sampler.taken:  # told to leave, in the middle of an epoch
                break
        else:
            score = evaluate(average, held_out, backend)
            history.append((loss, score))
            backend.print(f"epoch {epoch}  loss {loss:.3f}  accuracy {score:.3f}")
            if score > best:
                best = score
                phalanx.save_checkpoint(
                    args.out / "best", model=average.module, step=schedule.last_epoch
                )
        phalanx.save_checkpoint(
            args.out / "last",
            model=both,
            optimizer=optimizer,
            step=schedule.last_epoch,
            extra={
                "data": sampler.state_dict(),
                "rate": schedule.state_dict(),
                "scale": scaler.state_dict(),
                "best": best,
            },
        )
        if notice.given():
            break
    return history


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"))
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    args = options()
    log = f"jsonl:{args.out}/scalars.jsonl"
    with (
        phalanx.init() as backend,
        phalanx.Notice(backend) as notice,
        phalanx.Scalars(backend, [log], every=10) as scalars,
    ):
        train(args, backend, notice, scalars)
    sys.exit(notice.exit_code)

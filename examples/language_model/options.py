"""What can be chosen on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from language_model.strategies import DDP, SYNTAX, read_strategy
from language_model.text import InputError

NEWEST = "newest"


def _number(
    kind: type[int | float], what: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


WHOLE = _number(int, "a whole number of at least 0", lambda n: 0 <= n < 2**32)
POSITIVE = _number(int, "a whole number of at least 1", lambda n: n >= 1)
RATE = _number(float, "a number above 0", lambda x: 0 < x < float("inf"))
TEMPERATURE = _number(float, "a number of at least 0", lambda x: 0 <= x < float("inf"))
FILES, MODEL, TRAINING, SAMPLE = "files", "model", "training", "the sample at the end"


def _option(default: object, group: str, explanation: str, **how: Any) -> Any:
    return field(default=default, metadata={"group": group, "how": {"help": explanation, **how}})


def _whole(default: int, group: str, explanation: str) -> Any:
    return _option(default, group, explanation, type=WHOLE, metavar="N")


def _positive(default: int, group: str, explanation: str) -> Any:
    return _option(default, group, explanation, type=POSITIVE, metavar="N")


@dataclass(frozen=True)
class Options:
    """One training run: each field is an option of the command line."""

    data: str | None = _option(
        None, FILES, "text to learn from (default: Python's library)", metavar="FILE_OR_FOLDER"
    )
    out: str = _option(
        "runs/language_model",
        FILES,
        "log, loss curve, checkpoints; all ranks see it",
        metavar="DIR",
    )
    checkpoint_every: int = _whole(
        200, FILES, "steps between checkpoints, of which the last three stay; 0: one at the end"
    )
    resume: str | None = _option(
        None,
        FILES,
        "go on from the newest checkpoint in --out, or from this one, with any --strategy and any "
        "number of ranks, if --batch-size x ranks stays the same",
        nargs="?",
        const=NEWEST,
        metavar="CHECKPOINT",
    )

    layers: int = _positive(4, MODEL, "transformer blocks")
    width: int = _positive(128, MODEL, "numbers that stand for a byte")
    heads: int = _positive(4, MODEL, "attention heads, which share the width")
    context: int = _positive(128, MODEL, "bytes that it looks back")

    steps: int = _positive(1000, TRAINING, "steps in all")
    batch_size: int = _positive(4, TRAINING, "windows of --context bytes a step, on each rank")
    learning_rate: float = _option(
        3e-3, TRAINING, "its peak, after the warm-up", type=RATE, metavar="X"
    )
    strategy: str = _option(
        DDP,
        TRAINING,
        f"what each rank keeps of the model, gradients and optimizer state: all, or shards (FSDP); "
        f"one of {SYNTAX}, where K ranks share a copy, by default those of a host, and ranks train "
        "by themselves for H steps",
        type=read_strategy,
        metavar="STRATEGY",
    )
    seed: int = _whole(0, TRAINING, "of the model, the batches and the sample")
    eval_every: int = _whole(100, TRAINING, "steps between held-out losses; 0: first and last only")
    log_every: int = _positive(50, TRAINING, "steps between two lines of progress")
    device: str = _option(
        "cpu", TRAINING, "where to compute: cpu is what there is so far", choices=["cpu"]
    )

    prompt: str = _option("def ", SAMPLE, "how it begins", metavar="TEXT")
    temperature: float = _option(
        0.8,
        SAMPLE,
        "how bold it is; 0: the likeliest byte each time",
        type=TEMPERATURE,
        metavar="X",
    )
    sample_bytes: int = _whole(400, SAMPLE, "how much is written")

    @property
    def folder(self) -> Path:
        """Where the files go."""
        return Path(self.out).expanduser()

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints go. On several hosts: a folder that all of them see."""
        return self.folder / "checkpoints"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise, so that it can be said once for all ranks."""
        raise InputError(f"{message} (--help lists the options)")


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. `InputError` if it makes no sense."""
    parser = _Parser(
        description="Train a small GPT, bytes in and bytes out: on every rank of phalanx run or "
        "torchrun, or on one rank without them. Without --data it learns from the source of "
        "Python's standard library.",
        epilog="example: phalanx run -n 2 examples/train_language_model.py --steps 200",
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in fields(Options):
        title = option.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        how = dict(option.metadata["how"])
        if option.default is not None and option.default is not False:
            how["help"] += " (default: %(default)r)"
        name = "--" + option.name.replace("_", "-")
        groups[title].add_argument(name, default=option.default, **how)
    options = Options(**vars(parser.parse_args(arguments)))
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} is not a multiple of twice --heads {options.heads}")
    return options

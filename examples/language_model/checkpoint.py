"""A checkpoint: one safetensors file with the model, AdamW's state, and how far training is.

    model.<parameter>              its values
    optimizer.<parameter>.<key>    exp_avg, exp_avg_sq, step
    __metadata__                   JSON: what the run is, and its history

One file, so that it is replaced at one stroke. No pickle: a checkpoint from a stranger is data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from language_model.history import History, replace_file
from language_model.text import InputError

FILE_NAME = "checkpoint.safetensors"


def save_checkpoint(
    folder: Path,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: History,
) -> None:
    """Write the state after `history`'s last step; the file is whole whenever this is stopped."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    about = {"identity": identity, "history": history.as_json()}
    content = save(tensors, metadata={"about": json.dumps(about)})
    replace_file(folder / FILE_NAME, content)


def read_checkpoint(folder: Path) -> bytes:
    """The file as it is. `InputError` if there is none."""
    try:
        return (folder / FILE_NAME).read_bytes()
    except OSError as error:
        raise InputError(
            f"--resume: cannot read {folder / FILE_NAME} ({error.strerror}); "
            "train without --resume first, or give the --out of that run"
        ) from error


def restore_checkpoint(
    content: bytes,
    identity: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> History:
    """Put a checkpoint's state into the model and the optimizer; return how it came about.

    `InputError` if it is no checkpoint, or one of another run than `identity` says.
    """
    try:
        tensors = load(content)
        header_size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_size])
        about = json.loads(header["__metadata__"]["about"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"--resume: this is no checkpoint of this script: {error}") from error
    theirs = about["identity"]
    differing = [key for key in identity if theirs.get(key) != identity[key]]
    if differing:
        differences = ", ".join(f"{k} {theirs.get(k)}, now {identity[k]}" for k in differing)
        raise InputError(f"--resume: the checkpoint is of another run: {differences}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            prefix = f"optimizer.{name}."
            optimizer.state[parameter] = {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
    return History.from_json(about["history"])

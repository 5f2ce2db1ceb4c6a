"""From the command line to a run that is ready to train, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import phalanx as px
from language_model.agreement import all_can, check_same_text, gather_fingerprints, share_bytes
from language_model.checkpoint import read_checkpoint, restore_checkpoint
from language_model.history import History
from language_model.model import GPT
from language_model.options import Options, parse_options
from language_model.text import Text, make_folder, read_text
from language_model.windows import Sampler, Windows, split_text


@dataclass(frozen=True)
class Run:
    """All that training needs. The same on every rank, but for the sampler."""

    options: Options
    text: Text
    training: Windows
    held_out: Windows
    sampler: Sampler
    model: GPT
    optimizer: torch.optim.Optimizer
    history: History
    identity: dict[str, Any]  # a checkpoint with another one is refused


def prepare(arguments: Sequence[str] | None, backend: px.Backend) -> Run:
    """Read what was asked for, the text, and with --resume the checkpoint.

    Whatever is wrong ends every rank, with one message.
    """
    with all_can(backend):
        options = parse_options(arguments)
        text = read_text(options.data)
        training, held_out = split_text(text.content, options.context)
        sampler = Sampler(
            len(training), options.batch_size, backend.rank, backend.world_size, options.seed
        )
        sampler.check()
        saved = b""
        if backend.rank == 0:
            make_folder(options.folder)
            saved = read_checkpoint(options.folder) if options.resume else b""
    fingerprints = gather_fingerprints(text.content, backend)
    saved = share_bytes(saved, backend)

    torch.manual_seed(options.seed)
    shape = {name: getattr(options, name) for name in ("context", "layers", "width", "heads")}
    model = GPT(**shape)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    identity = {
        **shape,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "windows_per_step": options.batch_size * backend.world_size,
        "text": f"{fingerprints[0]:014x}",
    }
    history = History()
    with all_can(backend):
        check_same_text(fingerprints)
        if options.resume:
            history = restore_checkpoint(saved, identity, model, optimizer)
    return Run(options, text, training, held_out, sampler, model, optimizer, history, identity)

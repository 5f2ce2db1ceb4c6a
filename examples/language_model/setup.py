"""From the command line to a run that is ready to train, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import phalanx as px
from language_model.agreement import all_can, check_same_text, gather_fingerprints
from language_model.checkpoint import find_checkpoint
from language_model.history import History
from language_model.model import GPT
from language_model.options import Options, parse_options
from language_model.strategies import check_strategy
from language_model.text import Text, make_folder, read_text
from language_model.windows import Windows, check_enough, make_sampler, split_text

ANOTHER = "--resume CHECKPOINT goes on from the one in that folder"


@dataclass(frozen=True)
class Run:
    """All that training needs. The same on every rank, but for the sampler.

    The model is a plain one, to be distributed. Training adds to the history.
    """

    options: Options
    text: Text
    training: Windows
    held_out: Windows
    sampler: px.BatchSampler
    model: GPT
    parameters: int  # of the whole model, wherever they are
    history: History
    checkpoint: Path | None  # to load into the model before training goes on
    identity: dict[str, Any]  # a checkpoint with another one is refused


def prepare(arguments: Sequence[str] | None, backend: px.Backend) -> Run:
    """Read what was asked for, the text, and with --resume how far the checkpoint is.

    Whatever is wrong ends every rank, with one message.
    """
    with all_can(backend):
        options = parse_options(arguments)
        check_strategy(options.strategy, backend)
        text = read_text(options.data)
        training, held_out = split_text(text.content, options.context)
        check_enough(training, held_out, options.batch_size, backend.world_size)
        if backend.rank == 0:
            make_folder(options.checkpoints)
    fingerprints = gather_fingerprints(text.content, backend)

    torch.manual_seed(options.seed)
    shape = {name: getattr(options, name) for name in ("context", "layers", "width", "heads")}
    model = GPT(**shape)
    identity = {
        **shape,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "windows_per_step": options.batch_size * backend.world_size,
        "text": f"{fingerprints[0]:014x}",
    }
    checkpoint, history = None, History()
    with all_can(backend, hint=ANOTHER):
        check_same_text(fingerprints)
        sampler = make_sampler(len(training), options.batch_size, options.seed, backend)
        if options.resume is not None:
            checkpoint, history, place = find_checkpoint(options, identity, backend)
            sampler.load_state_dict(place)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Run(
        *(options, text, training, held_out, sampler),
        *(model, parameters, history, checkpoint, identity),
    )

"""What of a checkpoint is this script's own: which run it is of, and what was measured in it.

OUT/checkpoints/000002-step-400/     a folder for each, written by `phalanx.save_checkpoint`
    model-*, state-*                 the model, AdamW's state, random states: one file a rank
    manifest.json                    what is where, and the `extra` of the script, in which is
                                     the sampler's place, too
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import phalanx as px
from language_model.history import History
from language_model.options import NEWEST, Options
from language_model.text import InputError

FORMER_NAME = "checkpoint.safetensors"  # what earlier forms of this script wrote


def make_extra(
    identity: dict[str, Any], history: History, sampler: px.BatchSampler
) -> dict[str, Any]:
    """What is saved beside the model and the optimizer."""
    return {"identity": identity, "history": history.as_json(), "sampler": sampler.state_dict()}


def find_checkpoint(
    options: Options, identity: dict[str, Any], backend: px.Backend
) -> tuple[Path, History, dict[str, Any]]:
    """The checkpoint that `--resume` asks for, how it came about, and the sampler's place in it.

    Every rank calls this.
    The model and the optimizer are not read yet. `InputError`, on every rank, if there is none, or
    it is of another run than `identity` says.
    """
    folder = (
        options.checkpoints if options.resume == NEWEST else Path(options.resume or "").expanduser()
    )
    try:
        found = px.load_checkpoint(folder, backend=backend, random_state=False)
    except px.CheckpointNotFoundError as error:
        raise InputError(f"--resume: {_instead(options, folder)}") from error
    match found.extra:
        case {"identity": dict(theirs), "history": dict(history), "sampler": dict(place)}:
            _check_same_run(found.folder, theirs, identity)
            return found.folder, History.from_json(history), place
    raise InputError(f"--resume: {found.folder} is no checkpoint of this script")


def _check_same_run(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    differing = [key for key in ours if theirs.get(key) != ours[key]]
    if differing:
        differences = ", ".join(f"{key} {theirs.get(key)}, now {ours[key]}" for key in differing)
        same = (
            ""
            if differing != ["windows_per_step"]
            else "; --batch-size x ranks is to stay the same"
        )
        raise InputError(f"--resume: {folder} is of another run: {differences}{same}")


def _instead(options: Options, folder: Path) -> str:
    former = options.folder / FORMER_NAME
    if options.resume == NEWEST and former.is_file():
        return (
            f"{former} is of an earlier form of this script, and cannot be read any more: train "
            "without --resume"
        )
    return (
        f"there is no checkpoint in {folder}: train without --resume first, or give the --out of "
        "that run"
    )

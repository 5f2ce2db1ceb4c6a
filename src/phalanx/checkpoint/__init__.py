"""Checkpoints: model, optimizer and random states on disk, safe from interrupted saves."""

from phalanx.checkpoint.async_saves import PendingSave
from phalanx.checkpoint.load import Checkpoint, latest_checkpoint, load_checkpoint
from phalanx.checkpoint.pretrained import load_pretrained
from phalanx.checkpoint.save import save_checkpoint

__all__ = [
    "Checkpoint",
    "PendingSave",
    "latest_checkpoint",
    "load_checkpoint",
    "load_pretrained",
    "save_checkpoint",
]

"""Checkpoints: what training needs to go on, on disk, whatever happens while it is written."""

from phalanx.checkpoint.load import Checkpoint, latest_checkpoint, load_checkpoint
from phalanx.checkpoint.pending import PendingSave
from phalanx.checkpoint.save import save_checkpoint

__all__ = [
    "Checkpoint",
    "PendingSave",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]

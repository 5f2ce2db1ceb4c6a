"""Small tensors and many ranks, and folders that cost nothing to fsync."""

from __future__ import annotations

from checkpoint_fixtures import folder, victim

__all__ = ["folder", "victim"]

"""Checkpoints are converted in the folders of their own tests."""

from __future__ import annotations

from checkpoint_fixtures import folder, victim

__all__ = ["folder", "victim"]

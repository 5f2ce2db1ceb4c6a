"""Checkpoints are converted in the folders of their own tests."""

from __future__ import annotations

from checkpoint_fixtures import folder, one_thread_a_rank, victim

__all__ = ["folder", "one_thread_a_rank", "victim"]

"""Commands about checkpoints have the folders of their tests."""

from __future__ import annotations

from checkpoint_fixtures import folder, one_thread_a_rank, victim

__all__ = ["folder", "one_thread_a_rank", "victim"]

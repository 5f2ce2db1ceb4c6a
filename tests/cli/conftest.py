"""Commands about checkpoints have the folders of their tests."""

from __future__ import annotations

from checkpoint_fixtures import folder, victim

__all__ = ["folder", "victim"]

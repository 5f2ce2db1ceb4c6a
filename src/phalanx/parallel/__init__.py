"""Ways to split a model and its training over ranks."""

from phalanx.parallel.ddp import DDP

__all__ = ["DDP"]

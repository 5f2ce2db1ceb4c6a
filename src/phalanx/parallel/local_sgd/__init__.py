"""Training that communicates now and then: every rank takes steps of its own in between."""

from phalanx.parallel.local_sgd.api import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]

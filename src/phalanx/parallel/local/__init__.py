"""Training that communicates now and then: every rank takes steps of its own in between."""

from phalanx.parallel.local.diloco import DiLoCo
from phalanx.parallel.local.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]

"""Elastic training: groups whose ranks die, leave and arrive while the others go on."""

from phalanx.elastic.api import Elastic, ElasticStep
from phalanx.elastic.regrouping import Generation

__all__ = ["Elastic", "ElasticStep", "Generation"]

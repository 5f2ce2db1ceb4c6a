"""Elastic groups: ranks die, leave and arrive, and all others go on in their processes."""

from phalanx.elastic.api import Elastic, ElasticStep, Generation

__all__ = ["Elastic", "ElasticStep", "Generation"]

"""All columns of the table. A new feature is one class in one of these files."""

from __future__ import annotations

import features_of_models
import features_of_programs
import features_of_training
from feature import FEATURES, Feature, fits

SECTIONS = (
    *("training", "gradients", "optimizers", "compression"),
    *("precision", "parameters", "layers", "hooks", "programs", "errors"),
)
FEATURES.sort(key=lambda one: SECTIONS.index(one.section))

__all__ = [
    "FEATURES",
    "SECTIONS",
    "Feature",
    "features_of_models",
    "features_of_programs",
    "features_of_training",
    "fits",
]

"""Elastic training: groups whose ranks die, leave and arrive while the others go on."""

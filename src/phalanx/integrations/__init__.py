"""Phalanx under the engines of others; each module is for one package, which is an extra."""

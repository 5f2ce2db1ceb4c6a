"""Optimizers whose work and state is dealt to the ranks."""

from phalanx.optim.sharded import ShardedOptimizer

__all__ = ["ShardedOptimizer"]

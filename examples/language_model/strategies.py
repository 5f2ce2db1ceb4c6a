"""What `--strategy` takes: who has which part of the model.

ddp             every rank has all of it
full_shard      a part of everything on each rank; the whole of a block while it computes
shard_grad_op   all parameters; a part of the gradients and the optimizer's state
no_shard        as ddp, done by FSDP
hybrid          full_shard over the ranks of a host, the same on every host
hybrid:K        full_shard over each K consecutive ranks
"""

from __future__ import annotations

import argparse
import re

import phalanx as px
from language_model.text import InputError

DDP = "ddp"
SYNTAX = "ddp|full_shard|shard_grad_op|no_shard|hybrid[:K]"


def read_strategy(text: str) -> str:
    """The text, if it is one of these."""
    if re.fullmatch("ddp|full_shard|shard_grad_op|no_shard|hybrid(:[1-9][0-9]*)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {SYNTAX}")
    return text


def strategy_of(text: str, backend: px.Backend) -> px.ShardingStrategy:
    """FSDP's strategy for what was asked for; nothing is sent."""
    name, _, size = text.partition(":")
    if name == "hybrid":
        on_this_host = backend.topology.count(backend.topology[backend.rank])
        return px.ShardingStrategy.hybrid(intra_node_size=int(size or on_this_host))
    return {
        "full_shard": px.ShardingStrategy.FULL_SHARD,
        "shard_grad_op": px.ShardingStrategy.SHARD_GRAD_OP,
        "no_shard": px.ShardingStrategy.NO_SHARD,
    }[name]


def check_strategy(text: str, backend: px.Backend) -> None:
    """`InputError` if it does not fit the number of ranks."""
    if text == DDP:
        return
    try:
        strategy_of(text, backend).ranks_per_copy(backend.world_size)
    except px.InvalidWorldSizeError as error:
        raise InputError(f"--strategy {text}: {error}") from error

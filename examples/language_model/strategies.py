"""What `--strategy` takes: who has which part of the model, and how often ranks agree on it.

ddp             every rank has all of it
full_shard      a part of everything on each rank; the whole of a block while it computes
shard_grad_op   all parameters; a part of the gradients and the optimizer's state
no_shard        as ddp, done by FSDP
hybrid          full_shard over the ranks of a host, the same on every host
hybrid:K        full_shard over each K consecutive ranks
local_sgd:H     every rank has all of it, and trains by itself for H steps; then they take the mean
diloco:H        as local_sgd, but an outer optimizer steps along the mean of the ways they have come
"""

from __future__ import annotations

import argparse
import re
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

import phalanx as px
from language_model.model import GPT
from language_model.text import InputError

DDP = "ddp"
SYNTAX = "ddp|full_shard|shard_grad_op|no_shard|hybrid[:K]|local_sgd:H|diloco:H"
_SHARDED = "full_shard|shard_grad_op|no_shard|hybrid(:[1-9][0-9]*)?"
_PERIODIC = "(local_sgd|diloco):[1-9][0-9]*"
Distributed: TypeAlias = px.DDP | px.FSDP | px.LocalSGD | px.DiLoCo


def read_strategy(text: str) -> str:
    """The text, if it is one of these."""
    if re.fullmatch(f"{DDP}|{_SHARDED}|{_PERIODIC}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {SYNTAX}")
    return text


def is_periodic(text: str) -> bool:
    """Whether ranks train by themselves between two messages."""
    return re.fullmatch(_PERIODIC, text) is not None


def periodic(text: str, model: GPT, backend: px.Backend) -> px.LocalSGD | px.DiLoCo:
    """The model on all ranks, each of which trains it by itself most of the time."""
    name, _, every = text.partition(":")
    if name == "local_sgd":
        return px.LocalSGD(model, backend, every=int(every))
    return px.DiLoCo(
        model,
        backend,
        every=int(every),
        # Momentum pays when there are many outer steps; a run of this script has a few.
        outer=lambda params: torch.optim.SGD(params, lr=1.0),
        compression=px.ErrorFeedback(px.Quantized(bits=4)),
    )


def alike(model: Distributed) -> AbstractContextManager[None]:
    """In here all ranks have the same model, to look at it: the mean of theirs."""
    if isinstance(model, px.LocalSGD | px.DiLoCo):
        return model.averaged()
    return nullcontext()


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
    if text == DDP or is_periodic(text):
        return
    try:
        strategy_of(text, backend).ranks_per_copy(backend.world_size)
    except px.InvalidWorldSizeError as error:
        raise InputError(f"--strategy {text}: {error}") from error

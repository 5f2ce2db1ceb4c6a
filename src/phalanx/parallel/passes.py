"""What torch says about the backward pass that runs."""

from __future__ import annotations

import torch


def inside_backward() -> bool:
    """Whether this thread runs a backward pass, which runs checkpointed forward passes again."""
    return torch._C._current_graph_task_id() >= 0


def keeps_graph() -> bool:
    """Whether it was asked to keep the graph, so that another one may follow. If unknown: yes."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(ask()) if ask is not None else True

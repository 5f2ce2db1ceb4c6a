"""A backward pass in two parts: B, the gradient of a stage's input, and W, those of its weights.

    loss <- linear <- gelu <- linear <- input       B goes along this path
              |                 |
              w2                w1                  W goes from it to the leaves

B is `torch.autograd.grad` with respect to the stage's input: autograd then computes along the path
only. In a node with several gradients, such as that of a linear layer, it computes only those on
the path. If nodes on the path lead to weights, B also takes the gradients that come into them. At
each of these a part of W begins later, in which autograd computes the other gradients of that node.
So nothing is computed twice but the common part of one node's gradients, such as the statistics of
a norm.

Some of it cannot wait, and is done in B, so that gradients are always those of one backward pass:

- a parameter that several nodes on the path lead to, so that its gradient is their sum;
- the leaves behind a Python `autograd.Function`, which computes all of its gradients
  each time, or whose saved tensors are not kept but made again, as by `checkpoint`;
- all, if a parameter has post-accumulate hooks, such as DDP's and FSDP's, which count on one
  backward pass for all, and with `checkpoint(use_reentrant=True)`, which forbids another way.

If no gradient of the input is requested, as on the first stage, all of it is W. Hooks on
activations may be called in B and in W, both times with the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from phalanx.parallel.gradient_parts import mark_part
from phalanx.torch_internals import post_accumulate_hooks

ACCUMULATES = "torch::autograd::AccumulateGrad"
REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"


class WeightPart(NamedTuple):
    """A part of W: from the gradients that came into a node, to those of leaves.

    roots       autograd's starting points: edges into the node, or the root of the graph
    gradients   one for each
    leaves      the owners of `.grad` that it adds to; None for all that it reaches
    """

    roots: list[Any]
    gradients: list[Tensor]
    leaves: list[Tensor] | None

    def run(self) -> None:
        """Compute this part of W. Frees the node's saved tensors."""
        torch.autograd.backward(self.roots, self.gradients, inputs=self.leaves)


def backward_input(root: Tensor, gradient: Tensor, start: Tensor | None) -> list[WeightPart]:
    """Do B of the backward pass from `root`; return W. Blocks while it computes.

    gradient    of the root
    start       a leaf behind the stage's input; None if the input needs no gradient

    The graph's saved tensors live until W is done. The gradients of weights that B has computed are
    in `.grad` already.
    """
    graph = _reach([get_gradient_edge(root).node], _following)
    input_edge = None if start is None else get_gradient_edge(start)
    if input_edge is None or input_edge.node not in graph:
        return [WeightPart([root], [gradient], None)]
    now, later = _leaves(graph, input_edge.node)
    if not later or any(map(_needs_one_pass, graph)):
        torch.autograd.backward(root, gradient)
        return []
    edges = [
        GradientEdge(node, number) for node in later for number in range(len(node._input_metadata))
    ]
    wanted = [input_edge, *(GradientEdge(leaf, 0) for leaf in now), *edges]
    _, *found = torch.autograd.grad(root, wanted, gradient, retain_graph=True, allow_unused=True)
    with torch.no_grad():
        for leaf, leaf_gradient in zip(now, found, strict=False):
            if leaf_gradient is not None:
                leaf(leaf_gradient)  # its hooks have been called, and it adds to `.grad`
    parts = {node: WeightPart([], [], [leaf.variable for leaf in later[node]]) for node in later}
    for into, into_gradient in zip(edges, found[len(now) :], strict=True):
        if into_gradient is not None:
            parts[into.node].roots.append(into)
            parts[into.node].gradients.append(into_gradient)
    return [part for part in parts.values() if part.roots]


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _reach(first: list[Node], onward: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """Return these nodes and all others that `onward` reaches from them, in that order."""
    order, found = list(first), dict.fromkeys(first)
    for node in order:  # which grows
        for other in onward(node):
            if other not in found:
                found[other] = None
                order.append(other)
    return found


def _leaves(graph: Iterable[Node], goal: Node) -> tuple[list[Any], dict[Node, list[Any]]]:
    """Return the leaves beside the path to `goal`: those for B, and for W by node of the path."""
    users: dict[Node, list[Node]] = {}
    for node in graph:
        for following in _following(node):
            users.setdefault(following, []).append(node)
    path = _reach([goal], lambda node: users.get(node, []))
    led_to: dict[Node, list[Node]] = {}  # leaf -> the nodes on the path that lead to it
    for node in graph:
        if node in path:
            for other in _reach([n for n in _following(node) if n not in path], _following):
                if other.name() == ACCUMULATES:
                    led_to.setdefault(other, []).append(node)
    now: list[Any] = []
    later: dict[Node, list[Any]] = {}
    for leaf, (node, *others) in led_to.items():
        if others or _computes_all(node):
            now.append(leaf)
        else:
            later.setdefault(node, []).append(leaf)
    return now, later


def _needs_one_pass(node: Any) -> bool:
    """Return whether the whole graph of this node needs a single backward pass."""
    name: str = node.name()
    hooks = post_accumulate_hooks(node.variable) if name == ACCUMULATES else []
    # A pipeline marks all of its gradients itself.
    return name == REENTRANT_CHECKPOINT or not {mark_part}.issuperset(hooks)


def _computes_all(node: Any) -> bool:
    """Return whether each pass through a node computes all its gradients or saved tensors."""
    if isinstance(node, BackwardCFunction):
        return True
    for name in _names_of_saved(type(node)):  # type: ignore[arg-type]
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, (tuple, list)) else [saved]:
            # An older torch does not tell: each part of W then makes the saved tensors again.
            if getattr(tensor, "unpack_hook", None) is not None:
                return True
    return False


@cache
def _names_of_saved(kind: Hashable) -> list[str]:
    """Return the attributes of a kind of node that are saved tensors, or tuples of them."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]

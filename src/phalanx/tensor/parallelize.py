"""parallelize: put parallel layers into an existing model, by name.

plan = {
    "blocks.*.attention.qkv": ColumnStyle(parts=(width,) * 3, unit=head_width),
    "blocks.*.attention.out": RowStyle(unit=head_width),
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
parallelize(model, backend, plan)
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import cast

from torch import nn

from phalanx.collectives.request import check_backend
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError, UnsupportedOperationError
from phalanx.parallel.guards import check_agreement
from phalanx.parallel.wrapper import Wrapper
from phalanx.tensor.embedding import EmbeddingStyle, SequenceNormStyle
from phalanx.tensor.layer import (
    SAME_MODEL,
    ParallelLayer,
    Split,
    Style,
    checked_splits,
    described,
    own_part,
)
from phalanx.tensor.linear import ColumnStyle, RowStyle

STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "column": ColumnStyle(),
        "row": RowStyle(),
        "embedding": EmbeddingStyle(),
        "sequence_norm": SequenceNormStyle(),
    }
)
Plan = Mapping[str, "str | Style"]
SHOWN = 12  # names, in an error

# Modules that compute with the weights of their layers without calling the layers.
_BYPASSING_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def parallelize(module: nn.Module, backend: Backend, plan: Plan) -> nn.Module:
    """Replace layers of a model by parallel ones, in place, and return the model.

    plan   patterns of the names of submodules, as `named_modules()` has them, where `*` is anything
        (dots, too), and for each the style of the layers: "column" (`ColumnParallelLinear`), "row"
        (`RowParallelLinear`), "embedding" (`ParallelEmbedding`) or "sequence_norm"
        (`SequenceParallelNorm`) with default options, or a `ColumnStyle`, `RowStyle`,
        `EmbeddingStyle` or `SequenceNormStyle` with options. A model that is itself a layer has the
        name ""; its replacement is returned

    Every rank calls it with the same model and plan, before the optimizer is made and before the
    model is wrapped (in DDP, over the ranks that have the same parts: `mesh["data"]`). Each rank
    keeps its part of the parameters that are cut, under the same names; all others are whole, and
    stay equal, since their gradients are equal. Code between the layers has to use the sizes of its
    inputs: heads by `unflatten(-1, (-1, head_width))`. Dropout of whole activations has to
    drop the same on every rank: seed the ranks alike, and let random functions between the layers
    draw equally many numbers on each (as they do if heads and features divide by the ranks).

    Weights that are tied, such as an embedding's and an output layer's, stay tied if all of their
    layers are in the plan and cut them alike ("embedding" and "column"). Hooks of parameters stay,
    and get this rank's part; their handles do not remove them any more.

    Layers between a "column" and a "row" see this rank's part of the features, and layers between
    two with `sequence_dim` its part of the sequence. If they have parameters, these would learn
    from that part only, which cannot be seen here: norms have to be "sequence_norm", and others go
    through `copy_to_ranks` before they are used. `check_whole_parameters` finds forgotten ones.

    Blocks for a message of 8 bytes: `DesyncError` names the difference between ranks, parameters'
    values too. Before that, and before anything is changed, raises `ValueError` for a pattern that
    matches nothing, two that disagree about a layer, a layer that cannot be cut over so many ranks;
    `UnsupportedOperationError` for a layer of a kind that the style does not know, or whose weights
    are used without calling it; `MisuseError` for tied weights of which only some are in the plan.
    """
    check_backend(backend, "parallelize(module, backend, plan)", plan)
    _check_arguments(module, plan, backend.rank)
    styles = _match(module, plan)
    splits = _check_splits(module, styles, backend.world_size)
    tied = _tied_parts(module, splits, backend.rank)
    check_agreement(
        [*(f"{name} as {style}" for name, style in styles.items()), *described(module)],
        backend,
        op="parallelize",
        remedy=SAME_MODEL + ". Give all ranks the same plan",
    )
    replaced: dict[nn.Module, ParallelLayer] = {}
    for name, style in styles.items():
        plain = module.get_submodule(name)
        if plain not in replaced:  # else it is in two places
            replaced[plain] = layer = style.makes.__new__(style.makes)
            layer.shard_from(plain, style, splits[name], backend, label=name, tied=tied)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(module, module)


def _check_arguments(module: nn.Module, plan: Plan, rank: int) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: the model has to be an nn.Module, not {module!r}")
    if not isinstance(plan, Mapping) or not all(isinstance(name, str) for name in plan):
        raise TypeError(
            "parallelize: a plan is a dict from patterns of names to styles, such as "
            f'{{"blocks.*.up": "column"}}, not {plan!r}'
        )
    if any(isinstance(part, Wrapper) for part in module.modules()):
        raise MisuseError(
            f"rank {rank}: parallelize: the model is wrapped already: call it first, and wrap what "
            "it returns"
        )
    for pattern, style in plan.items():
        if not (isinstance(style, Style) or (isinstance(style, str) and style in STYLES)):
            raise ValueError(
                f"parallelize: {style!r}, for {pattern!r}, is no style: there are "
                f"{', '.join(map(repr, STYLES))}, and ColumnStyle(...) and the like, with options"
            )


def _match(module: nn.Module, plan: Plan) -> dict[str, Style]:
    """Return the style of each layer in the plan, in the model's order. Changes nothing."""
    styles: dict[str, Style] = {}
    first: dict[nn.Module, tuple[str, Style]] = {}
    of_pattern = {p: STYLES[s] if isinstance(s, str) else s for p, s in plan.items()}
    unmatched = dict.fromkeys(plan)
    for name, layer in module.named_modules(remove_duplicate=False):
        for pattern, style in of_pattern.items():
            if not fnmatchcase(name, pattern):
                continue
            unmatched.pop(pattern, None)
            other_name, other = first.setdefault(layer, (name, style))
            if other != style:
                also = f", which is {other_name}, too," if other_name != name else ""
                raise ValueError(
                    f"parallelize: the plan has two styles for {name}{also}: {other} and {style}"
                )
            styles[name] = style
    if unmatched:
        names = [name or "''" for name, _ in module.named_modules()]
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        raise ValueError(
            f"parallelize: nothing in the model matches {', '.join(map(repr, unmatched))}. "
            f"Its modules are {shown}"
        )
    return styles


def _check_splits(
    module: nn.Module, styles: Mapping[str, Style], ranks: int
) -> dict[str, dict[str, Split]]:
    """Return the cuts of each layer's parameters. Raises if one cannot be cut."""
    splits = {}
    for name, style in styles.items():
        parent = module.get_submodule(name.rpartition(".")[0])
        if name and isinstance(parent, _BYPASSING_LAYERS):
            raise UnsupportedOperationError(
                f"parallelize: {name} is part of a {type(parent).__name__}, which computes with "
                "its layers' weights without calling them: write it with layers of your own"
            )
        splits[name] = checked_splits(
            module.get_submodule(name), style, ranks, f"parallelize: {name or 'the model'}"
        )
    return splits


def _tied_parts(
    module: nn.Module, splits: Mapping[str, Mapping[str, Split]], rank: int
) -> dict[nn.Parameter, nn.Parameter]:
    """Return this rank's parts of parameters that several layers have. Raises `MisuseError`."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    parts = {}
    for parameter, names in users.items():
        cuts = []
        for name in names:
            layer, _, own = name.rpartition(".")
            cuts.append(splits[layer].get(own) if layer in splits else "not in the plan")
        if len(names) == 1 or set(cuts) == {"not in the plan"}:
            continue
        if len(set(cuts)) > 1:
            raise MisuseError(
                f"parallelize: {' and '.join(names)} are one parameter, and the plan does not cut "
                "it the same way in each place. Name all of its layers in the plan, with styles "
                "that cut it alike (an embedding, and a column of the same size), or untie them"
            )
        parts[parameter] = own_part(parameter, cast("Split | None", cuts[0]), rank)
    return parts

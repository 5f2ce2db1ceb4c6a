"""The common base of parallel layers: a plain layer of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from torch import Tensor, nn

from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError, UnsupportedOperationError
from phalanx.parallel.gradient_parts import mark_part
from phalanx.parallel.guards import check_agreement, describe_with_values
from phalanx.parallel.wrapper import WrapperHook
from phalanx.tensor.functions import reduce_from_ranks, scatter_sum
from phalanx.tensor.shards import ShardSpec
from phalanx.torch_internals import copy_hooks

if TYPE_CHECKING:
    from typing_extensions import Self

SAME_MODEL = (
    "Build the same model, with the same values, on every rank: call torch.manual_seed(seed) "
    "before it is built, or load one state into it"
)


class Split(NamedTuple):
    """The dimension along which a parameter is cut, and the cut."""

    dim: int
    cut: ShardSpec


class Style:
    """The way from a plain layer to a parallel one: its options, for `parallelize`.

    takes   the kinds of plain layers that it knows; exactly these, since a subclass may do
            something else
    makes   the kind of parallel layer
    """

    takes: ClassVar[tuple[type[nn.Module], ...]]
    makes: ClassVar[type[ParallelLayer]]

    def splits(self, plain: nn.Module, ranks: int) -> dict[str, Split]:
        """Return the parameters' cuts; others are whole on every rank. Here all are.

        Raises `ValueError` if some rank would get nothing, or the options do not fit.
        """
        return {}


class ParallelLayer(nn.Module):
    """A layer of which each rank of `backend` holds a part, under the plain layer's names.

    backend   the ranks that have the other parts; not copied by `deepcopy`
    splits    the parameters' cuts; one that is not in here is whole, and equal, on every rank
    label     its name in errors
    """

    style: Style
    backend: Backend
    splits: Mapping[str, Split]
    label: str
    weight: Tensor | None

    def __init__(self, plain: nn.Module, backend: Backend, style: Style) -> None:
        label = type(self).__name__
        splits = checked_splits(plain, style, backend.world_size, label)
        lines = [f"{label} of {plain} with {style}", *described(plain)]
        check_agreement(lines, backend, op=label, remedy=SAME_MODEL)
        self.shard_from(plain, style, splits, backend, label=label)

    @classmethod
    def from_plain(cls, plain: nn.Module, backend: Backend, style: Style) -> Self:
        """Return this rank's part of a plain layer. Blocks for a message of 8 bytes."""
        layer = cls.__new__(cls)
        ParallelLayer.__init__(layer, plain, backend, style)
        return layer

    def shard_from(
        self,
        plain: nn.Module,
        style: Style,
        splits: Mapping[str, Split],
        backend: Backend,
        *,
        label: str,
        tied: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """Make this new layer this rank's part of a plain one. Sends nothing.

        tied   this rank's parts of parameters that other layers have too
        """
        nn.Module.__init__(self)
        self.style, self.backend, self.splits, self.label = style, backend, dict(splits), label
        for name, parameter in plain._parameters.items():
            own = None
            if parameter is not None:
                own = tied.get(parameter)
                own = own_part(parameter, splits.get(name), backend.rank) if own is None else own
            self.register_parameter(name, own)
        for parameter in self.other_parts()[1] if backend.world_size > 1 else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(mark_part)  # type: ignore[no-untyped-call]
        self.train(plain.training)

    def other_parts(self) -> tuple[Backend, list[nn.Parameter]]:
        """Return the ranks that have the other parts, and the parameters that are cut."""
        own = (self._parameters[name] for name in self.splits)
        return self.backend, [parameter for parameter in own if parameter is not None]

    def whole_size(self, dim: int) -> int:
        """Return the whole weight's length along `dim`."""
        split = self.splits["weight"]
        return split.cut.total if split.dim == dim else cast(Tensor, self.weight).shape[dim]

    def describe_part(self) -> str:
        """Return this rank's part of the weight as text, for `extra_repr`."""
        cut = self.splits["weight"].cut
        rank = self.backend.rank
        return f"rank {rank} of {self.backend.world_size}: {cut.sizes()[rank]} of {cut.total}"

    def check_width(self, x: Tensor, width: int, remedy: str) -> None:
        """Raise `SizeMismatchError` unless an input has `width` features in the last dim."""
        if x.dim() == 0 or x.shape[-1] != width:
            rank = self.backend.rank
            raise SizeMismatchError(
                f"rank {rank}: {self.label} takes {width} features here, in the last dim, and got "
                f"an input of shape {list(x.shape)}. {remedy}",
                rank=rank,
                op=self.label,
            )

    def sum_over_ranks(self, x: Tensor, sequence_dim: int | None) -> Tensor:
        """Return the sum of the ranks' `x`, or this rank's part of it along `sequence_dim`."""
        if sequence_dim is None:
            return reduce_from_ranks(x, self.backend, label=self.label)
        self.check_sequence_dim(x, sequence_dim)
        return scatter_sum(x, self.backend, sequence_dim, label=self.label)

    def check_sequence_dim(self, x: Tensor, sequence_dim: int) -> None:
        """Raise `ValueError` unless it is a dimension, and not that of the features."""
        if not -x.dim() <= sequence_dim < x.dim() or sequence_dim % x.dim() == x.dim() - 1:
            raise ValueError(
                f"rank {self.backend.rank}: {self.label}: the sequence cannot lie along "
                f"sequence_dim={sequence_dim} of a tensor of shape {list(x.shape)}, whose last dim "
                "is that of the features"
            )


def described(plain: nn.Module) -> list[str]:
    """Return a module's parameters and buffers, with hashes of values, for `check_agreement`."""
    return [
        *(describe_with_values(name, value) for name, value in plain.named_parameters()),
        *(f"buffer {describe_with_values(name, value)}" for name, value in plain.named_buffers()),
    ]


def checked_splits(plain: nn.Module, style: Style, ranks: int, label: str) -> dict[str, Split]:
    """Return the cuts of a layer's parameters. Raises, naming `label`, unless `plain` is a layer
    that the style knows and can cut, and nothing else is attached to it.
    """
    kinds = " or ".join(f"nn.{kind.__name__}" for kind in style.takes)
    if isinstance(plain, ParallelLayer):
        raise UnsupportedOperationError(f"{label}: it is a {type(plain).__name__} already")
    if type(plain) not in style.takes:
        raise UnsupportedOperationError(
            f"{label}: {type(style).__name__} makes a parallel layer of {kinds}, not of "
            f"{type(plain).__module__}.{type(plain).__qualname__}: what else a layer of another "
            "kind does would be lost"
        )
    kinds_of_hooks = ("forward_pre", "forward", "backward_pre", "backward")
    attached = [f"{kind} hooks" for kind in kinds_of_hooks if getattr(plain, f"_{kind}_hooks")]
    if attached or plain._modules or plain._buffers:
        what = " and ".join(attached) or "more than a plain one"
        raise UnsupportedOperationError(
            f"{label}: this {kinds} has {what} (weight_norm and parametrizations are such), which "
            "would be lost. Take it off, and put it on the parallel layer"
        )
    try:
        return style.splits(plain, ranks)
    except (ValueError, UnsupportedOperationError) as error:
        raise type(error)(f"{label}: {error}") from None


def check_units(total: int, unit: int, ranks: int, what: str) -> None:
    """Raise `ValueError` unless `total` is whole units, and there is one for every rank."""
    if unit < 1:
        raise ValueError(f"unit={unit}: what stays together is 1 element or more")
    if total % unit:
        raise ValueError(f"{what} {total} is not a multiple of unit={unit}")
    if total // unit < ranks:
        units = f"units of {unit}" if unit > 1 else "elements"
        raise ValueError(
            f"{what} {total} is {total // unit} {units}, and cannot be cut over {ranks} ranks: "
            "every rank needs one"
        )


def own_part(parameter: nn.Parameter, split: Split | None, rank: int) -> nn.Parameter:
    """Return a copy of this rank's part, so that the whole can be freed; with the whole's hooks."""
    whole = parameter.detach()
    part = whole if split is None else split.cut.shard(whole, split.dim, rank)
    own = nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)
    # As copies: hooks of the part are none of the whole, which may be used on, as in a DDP.
    copy_hooks(parameter, own, keep=lambda hook: not isinstance(hook, WrapperHook))
    return own


def owners(module: nn.Module) -> dict[nn.Parameter, Backend]:
    """Return for each parameter that is cut the ranks that have the other parts."""
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLayer)]
    return {p: layer.backend for layer in layers for p in layer.other_parts()[1]}

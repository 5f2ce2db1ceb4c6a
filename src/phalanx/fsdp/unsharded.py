"""What a module computes with: full parameters, in memory that is there only at times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.errors import MisuseError

if TYPE_CHECKING:
    from typing_extensions import Self


class Presence:
    """Whether the full parameters of a unit may be used now.

    reached   told when a backward pass comes to what was computed from them in the forward pass
              under way
    """

    __slots__ = ("now", "reached", "unit")

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.now = False
        self.reached: Callable[[], None] | None = None


class Whole(nn.Parameter):
    """A full parameter of a unit, with the shape that the module expects.

    Modules see it in the place of the shard while they compute. It stays the same object, so that
    what autograd has saved of it is right again when the unit is gathered for its backward pass.
    To use it while the unit is freed is a `MisuseError`, whether its memory is gone or, being
    shared with other ranks, still there.
    """

    presence: Presence
    label: str

    def __new__(cls, data: Tensor, presence: Presence, label: str) -> Self:
        """A view of the unit's memory."""
        whole = super().__new__(cls, data, requires_grad=False)
        whole.presence = presence
        whole.label = label
        return whole

    def __init__(self, data: Tensor, presence: Presence, label: str) -> None:
        pass  # all is done: nn.Parameter has no __init__ that takes these

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What torch does, and what it gives; but not with what is freed."""
        used: set[Presence] = set()
        if not _looks_only(func):
            for whole in _among((*args, *kwargs.values()) if kwargs else args):
                used.add(whole.presence)
                if not whole.presence.now:
                    raise MisuseError(
                        f"FSDP: {whole.label} was used while its unit ({whole.presence.unit}) was "
                        "freed. A unit's full parameters are there during its own forward and "
                        "backward pass only: put modules that share a parameter into one unit, "
                        "read values with summon_full_params(), and clone what is to be kept"
                    )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            for presence in used:
                _watch(result, presence)
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        if self.presence.now:
            with torch._C.DisableTorchFunctionSubclass():
                return f"Whole({self.label}: {self.detach()!r})"
        return f"Whole({self.label}: {list(self.shape)}, freed)"


def _among(args: Iterable[Any]) -> Iterator[Whole]:
    for value in args:
        if isinstance(value, Whole):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Whole))


def _watch(result: Any, presence: Presence) -> None:
    """Tell of the backward pass before it comes to this result of a full parameter."""
    told = presence.reached
    if told is None:
        return
    for value in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.grad_fn.register_prehook(lambda _: told())


_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_LOOKS = frozenset(
    {
        *("size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "__len__"),
        *("is_floating_point", "is_complex", "get_device", "type", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "ndimension"),
    }
)


def _looks_only(func: Any) -> bool:
    """Whether it asks about a tensor, and not for its values."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return True
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _LOOKS

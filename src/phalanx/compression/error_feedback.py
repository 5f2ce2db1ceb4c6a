"""Error feedback: what a compressor leaves out is kept, and added to the next gradient.

    sent + residual  ==  gradient + former residual

(Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD".)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from phalanx.compression.compressor import (
    Compressor,
    Part,
    Rounds,
    State,
    check_compressor,
    check_floating,
    narrowed,
    wide,
)
from phalanx.compression.memory import (
    INNER,
    OWNED,
    RESIDUAL,
    Bundle,
    Memory,
    Remembers,
    owned_places,
    read_owned_key,
    shares,
    short_of,
    under,
)
from phalanx.errors import SizeMismatchError


class ErrorFeedback(Compressor):
    """A compressor that forgets nothing.

    compressor   any other one. Quantized rounds to nearest in here, unless it is told otherwise

    Sums are float32 (float64 for that), residuals too, whatever the gradients' dtype. The equation
    above holds bit for bit for `TopK`, `RandomK` and `Half`, whose messages are some of the values
    themselves or their rounding; else to one rounding of the larger of `sent` and `residual`. For
    an average it holds for the sums over all parts, with what each part and the owner of each slice
    keeps.

    It costs memory of the gradients' size twice (4 bytes a value each): what is left over, and
    while a pass runs, what that leaves over. A pass that comes to nothing (`rollback`) leaves it as
    it was.

    Its state (residuals.py) is this part's; `reshard` makes of all parts' states those of another
    number of parts.
    """

    def __init__(self, compressor: Compressor) -> None:
        check_compressor(compressor, "ErrorFeedback")
        if isinstance(compressor, ErrorFeedback):
            raise ValueError(f"{compressor!r} forgets nothing already")  # noqa: TRY004 - not a type
        self._inner = compressor.contraction()
        self._residuals = Memory()
        self._owned = Memory()
        self._parts = 1  # of the averages of this pass

    def __repr__(self) -> str:
        return f"ErrorFeedback({self._inner!r})"

    @property
    def inner(self) -> Compressor:
        """The compressor inside, in the form that is used."""
        return self._inner

    # By itself ------------------------------------------------------------------------------

    def compress(self, tensor: Tensor, name: str = "") -> Any:
        """The compressor's message for the tensor and what was left over of that name."""
        check_floating(tensor, self)
        bundle = Bundle.of([tensor], [name])
        wanted = self.recall(bundle, Part(0, 1))
        message = self._inner.compress(narrowed(wanted, tensor.dtype).view(tensor.shape))
        sent = self._inner.decompress(message).flatten()
        self.keep(bundle, lambda: wanted - sent.to(wanted.dtype))
        self.commit()
        return message

    def decompress(self, message: Any) -> Tensor:
        """What the compressor makes of it."""
        return self._inner.decompress(message)

    def residual(self, name: str = "") -> Tensor | None:
        """What is left over of that gradient on this part: flat; a copy. None: nothing yet."""
        kept = self._residuals.get(name)
        return kept.clone() if kept is not None else None

    def scale_(self, factor: float) -> None:
        """Multiply all that is left over: when the scale of the loss changes by that factor."""
        for memory in (self._residuals, self._owned):
            for _, kept in memory.items():
                kept.mul_(factor)

    # Together -------------------------------------------------------------------------------

    def average_(self, bundle: Bundle, part: Part, feedback: object = None) -> Rounds:
        """The compressor's rounds, with this as feedback."""
        yield from self._inner.average_(bundle, part, self)

    def average_shard_(self, bundle: Bundle, part: Part, feedback: object = None) -> Rounds:
        """The compressor's rounds, with this as feedback."""
        yield from self._inner.average_shard_(bundle, part, self)

    def recall(self, bundle: Bundle, part: Part) -> Tensor:
        """Gradients and what is left over of them: flat, new."""
        self._parts = part.parts
        wanted = bundle.flat.to(wide(bundle.flat.dtype), copy=True)
        for piece, values in bundle.cut(wanted):
            kept = self._residuals.latest(piece.name)
            if kept is None:
                continue
            if kept.numel() != values.numel():
                raise SizeMismatchError(
                    f"{self}: gradient {piece.name!r} has {values.numel()} values, and what was "
                    f"left over of it {kept.numel()}: load the state of the same model"
                )
            values.view(-1).add_(kept)
        return wanted

    def keep(self, bundle: Bundle, rest: Callable[[], Tensor]) -> None:
        """Keep that, if the pass counts."""
        flat = rest()
        for piece in bundle.pieces:
            self._residuals.put(piece.name, flat[piece.start : piece.stop])

    def recall_owned(self, bundle: Bundle, start: int, mean: Tensor) -> Tensor:
        """A mean and what was left out of the last one: new."""
        wanted = mean.clone()
        for key, low, high in owned_places(bundle, start, len(mean)):
            kept = self._owned.latest(key)
            if kept is not None:
                wanted[low:high].add_(kept)
        return wanted

    def keep_owned(self, bundle: Bundle, start: int, rest: Callable[[], Tensor]) -> None:
        """Keep that, if the pass counts."""
        flat = rest()
        for key, low, high in owned_places(bundle, start, len(flat)):
            self._owned.put(key, flat[low:high])

    # State ----------------------------------------------------------------------------------

    def remembers(self) -> Mapping[str, Remembers]:
        """What is left over, and the compressor's own."""
        return {RESIDUAL: self._residuals, OWNED: self._owned, INNER: self._inner}

    def commit(self) -> None:
        """The pass counts: what it has left over is for the next one."""
        self._take_back_owned()
        super().commit()

    def _take_back_owned(self) -> None:
        """What was left out of means that another part owns by now is this part's to send."""
        for key, kept in self._owned.items():
            name, start, stop = read_owned_key(key)
            rest = self._residuals.new(name)
            if rest is not None and self._owned.new(key) is None:
                rest[start:stop].add_(kept, alpha=self._parts)
                self._owned.drop(key)

    def reshard(self, states: Sequence[State | None], parts: int) -> list[dict[str, Tensor]]:
        """With as many parts as before, each gets its own, bit for bit; else equal shares of what
        averages are short of, summed in float64 and rounded once.
        """
        inner = self._inner.reshard(
            [None if state is None else under(INNER, state) for state in states], parts
        )
        known = [state for state in states if state is not None]
        if parts == len(states):
            left = [
                {} if state is None else {k: v for k, v in state.items() if not k.startswith(INNER)}
                for state in states
            ]
        else:
            left = [{} for _ in range(parts)]
            for name, missing in short_of(known, len(states)).items():
                dtype = next(s[RESIDUAL + name].dtype for s in known if RESIDUAL + name in s)
                for mine, share in zip(left, shares(missing, parts, dtype), strict=True):
                    mine[RESIDUAL + name] = share
        return [
            {**mine, **{INNER + key: value for key, value in own.items()}}
            for mine, own in zip(left, inner, strict=True)
        ]

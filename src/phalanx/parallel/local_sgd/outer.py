"""DiLoCo's meeting: how far all ranks have come, on average, is a gradient.

    inner   a step of each rank's optimizer, every time    t  ->  t_i
    outer   mean of (t - t_i)  ->  the outer optimizer     t  ->  t'      t_i <- t'

(Douillard et al. 2023; without momentum and with rate 1, t' is the mean of t_i.) With `Unsent`, t_i
becomes t' and what rank i has not told the others (unsent.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.compression import Compressor
from phalanx.compression.compressor import NO_RESIDUALS
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError, SizeMismatchError, UnsupportedObjectError
from phalanx.parallel.averaging import AllReduced, Averaging, Compressed
from phalanx.parallel.compressor_state import load_own, own_state
from phalanx.parallel.guards import check_agreement, describe_with_values
from phalanx.parallel.local_sgd.sync import Unsent, all_finite, averaged, in_words, not_finite_on

log = logging.getLogger("phalanx")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class OuterStep:
    """A step of an optimizer of its own, on copies of the parameters that all ranks have alike.

    optimizer   the outer one
    skipped     how many steps were not taken, since their gradient was not finite
    who         is it that takes them, in errors
    unsent      keeps what messages leave out, if parameters are to
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        backend: Backend,
        make: MakeOptimizer,
        compression: Compressor | None,
        *,
        who: str,
        unsent: Unsent | None = None,
    ) -> None:
        self.skipped = 0
        self.alike = True
        self._who = who
        self._unsent = unsent
        self.compression = compression
        self._trained = trained
        self._backend = backend
        self._copies = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()
        }
        self._copy_of = {trained[name]: copy for name, copy in self._copies.items()}
        self.optimizer = make(list(self._copies.values()))
        self._check_optimizer()
        self._plain = AllReduced(backend)
        self._averaging: Averaging = self._plain
        if compression is not None:
            names = {parameter: name for name, parameter in trained.items()}
            self._averaging = Compressed(
                compression, names, backend, feedback=unsent or NO_RESIDUALS
            )

    def _check_optimizer(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                "DiLoCo(outer=) makes a torch optimizer of a list of parameters, such as "
                f"lambda params: torch.optim.SGD(params, lr=0.7), not {self.optimizer!r}"
            )
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, copy in self._copies.items():
            if id(copy) not in given:
                raise MisuseError(
                    f"rank {self._backend.rank}: {self._who}: the outer optimizer leaves out "
                    f"{name}, which would stay as it is: give it all parameters that it is called "
                    "with",
                    rank=self._backend.rank,
                    op=self._who,
                )

    @property
    def bytes_sent(self) -> int:
        """Of outer gradients."""
        whole = self._plain.bytes_sent if self._plain is not self._averaging else 0
        return self._averaging.bytes_sent + whole

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters. Later only outer steps change the copies, so that whatever becomes
        of a rank's parameters they stay the same on all ranks.
        """
        for name, parameter in self._trained.items():
            self._copies[name].copy_(parameter)

    @torch.no_grad()
    def meet(self, label: str, *, whole: bool = False) -> None:
        """Average the outer gradients, step, and copy; or without a step, if they are not finite:
        then all are as they were when the period began.

        Raises `DesyncError` if the copies are not the same on all ranks: their hashes are compared,
        in a message of 16 bytes.
        """
        if self._unsent is not None and self._backend.world_size == 1:
            return

        def put(place: Tensor, parameter: Tensor) -> None:
            torch.sub(self._copy_of[parameter], parameter, out=place)  # type: ignore[index]

        unsent = None if whole else self._unsent
        averaging = self._plain if whole and self._unsent is not None else self._averaging
        flats = averaged(self._trained.values(), averaging, self._backend, label=label, put=put)
        self._check_copies()
        finite = all_finite(flats)
        if finite:
            for flat in flats:
                for parameter, gradient in flat.views():
                    self._copy_of[parameter].grad = gradient  # type: ignore[index]
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self._tell_skipped()
        for name, parameter in self._trained.items():
            parameter.copy_(self._copies[name])
            if unsent is not None:
                rest = unsent.take(name)
                if finite:
                    parameter.sub_(rest)
        self.alike = unsent is None or not finite

    def _check_copies(self) -> None:
        check_agreement(
            [describe_with_values(name, copy) for name, copy in self._copies.items()],
            self._backend,
            op=f"{self._who}, parameters as they were when the ranks last met",
            remedy="Load the same state on every rank: that of a checkpoint, or one that was taken "
            "right after sync()",
        )

    def _tell_skipped(self) -> None:
        self.skipped += 1
        log.warning(
            "rank %d: %s: %s is skipped on every rank, and parameters are those of the one "
            "before: they were not finite: %s. That rank's own optimizer may keep what is not "
            "finite: give it a new one",
            self._backend.rank,
            self._who,
            "an outer step" if self._unsent is None else "a meeting",
            in_words(not_finite_on(self._trained, self._backend)),
        )

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """The outer optimizer's, the copies while they are needed, and the compressor's."""
        copies = self._copies if apart else {}
        state = outer_state(copies, self._copies, self.optimizer)
        return state | (own_state(self.compression, self._backend) if self.compression else {})

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Go on from there; the copies, if they are in it."""
        sizes = {name: parameter.numel() for name, parameter in self._trained.items()}
        load_own(self.compression, state, self._backend, sizes_of=sizes)
        return load_outer(state, self._copies, self.optimizer, self._backend)


# ------------------------------------------------------------------------------
# The outer optimizer's state, as part of a state dict: the same on every rank.
#
# outer@all.parameter.<name>          a parameter as it was when the period began
# outer@all.state.<key>.<name>        what the optimizer keeps for it: a tensor, or a number
# outer@all.option.<group>.<key>      a number of a parameter group, such as the learning rate

_PREFIX = "outer@all."
_PARAMETER, _STATE, _OPTION = "parameter.", "state.", "option."


def outer_state(
    shown: Mapping[str, Tensor], copies: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> dict[str, Tensor]:
    """What an outer optimizer needs to go on; `shown` are the copies that are to be in it.

    Raises `UnsupportedObjectError` if it keeps something that is no tensor and no number.
    """
    state: dict[str, Tensor] = {
        _PARAMETER + name: copy.detach().clone() for name, copy in shown.items()
    }
    for name, copy in copies.items():
        for key, value in optimizer.state.get(copy, {}).items():
            if value is not None:
                state[f"{_STATE}{key}.{name}"] = _as_tensor(value, f"{key} of {name}")
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and isinstance(value, (bool, int, float, Tensor)):
                state[f"{_OPTION}{number}.{key}"] = _as_tensor(value, key)
    return {_PREFIX + key: value for key, value in state.items()}


def _as_tensor(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    raise UnsupportedObjectError(
        f"DiLoCo's outer optimizer keeps {value!r} as {what}: a state dict takes tensors and "
        "numbers only"
    )


@torch.no_grad()
def load_outer(
    state: Mapping[str, Any],
    copies: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    backend: Backend,
) -> dict[str, nn.Parameter]:
    """Go on from there; returns the copies if they are in it. Without any state nothing is done.

    Raises `SizeMismatchError` for that of another model.
    """
    own = {k[len(_PREFIX) :]: value for k, value in state.items() if k.startswith(_PREFIX)}
    if not own:
        return {}
    _check(own, copies, backend)
    optimizer.state.clear()
    for key, value in own.items():
        if key.startswith(_PARAMETER):
            copies[key[len(_PARAMETER) :]].copy_(value)
        elif key.startswith(_STATE):
            kept, name = key[len(_STATE) :].split(".", 1)
            optimizer.state[copies[name]][kept] = value.clone()
        else:
            number, option = key[len(_OPTION) :].split(".", 1)
            _set(optimizer, int(number), option, value)
    return dict(copies) if any(key.startswith(_PARAMETER) for key in own) else {}


def _set(optimizer: Optimizer, number: int, option: str, value: Tensor) -> None:
    if number >= len(optimizer.param_groups):
        return
    group = optimizer.param_groups[number]
    if isinstance(group.get(option), Tensor):
        group[option].copy_(value)
    elif option in group:
        group[option] = value.item()


def _check(own: Mapping[str, Tensor], copies: Mapping[str, nn.Parameter], backend: Backend) -> None:
    for key, value in own.items():
        if key.startswith(_OPTION):
            continue
        is_parameter = key.startswith(_PARAMETER)
        name = key[len(_PARAMETER) :] if is_parameter else key[len(_STATE) :].split(".", 1)[1]
        fits = name in copies and (not is_parameter or value.shape == copies[name].shape)
        if not fits:
            has = f"has shape {list(copies[name].shape)}" if name in copies else "is not there"
            raise SizeMismatchError(
                f"rank {backend.rank}: DiLoCo: the state dict has an outer {name} of shape "
                f"{list(value.shape)}, and in this model it {has}: it is the state of another "
                "model",
                rank=backend.rank,
            )

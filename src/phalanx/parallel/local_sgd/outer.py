"""DiLoCo's sync: how far all ranks have come, on average, is a gradient.

    inner   a step of each rank's optimizer, every time    t  ->  t_i
    outer   mean of (t - t_i)  ->  the outer optimizer     t  ->  t'      t_i <- t'

(Douillard et al. 2023; without momentum and with rate 1, t' is the mean of t_i.) With a
`ParameterResidual`, t_i becomes t' and what rank i has not sent to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.compression import Compressor
from phalanx.compression.compressor import NO_RESIDUALS, is_finite
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError, SizeMismatchError, UnsupportedObjectError
from phalanx.parallel.averaging import CompressedAveraging, GradientAveraging
from phalanx.parallel.compressor_state import load_own, own_state
from phalanx.parallel.guards import check_agreement, describe_with_values
from phalanx.parallel.local_sgd.sync import ParameterResidual, ParameterSync, averaged

log = logging.getLogger("phalanx")

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class OuterStep(ParameterSync):
    """A step of an optimizer of its own, on copies of the parameters that all ranks have alike.

    optimizer   the outer one
    skipped     how many steps were not taken, since their gradient was not finite
    who         takes them, in errors
    residual    keeps what messages leave out, if it is to stay in parameters
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        backend: Backend,
        make: MakeOptimizer,
        compression: Compressor | None,
        *,
        who: str,
        residual: ParameterResidual | None = None,
    ) -> None:
        super().__init__(trained, backend)
        self.skipped = 0
        self.compression = compression
        self._who = who
        self._residual = residual
        self._copies = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()
        }
        self._copy_of = {trained[name]: copy for name, copy in self._copies.items()}
        self.optimizer = make(list(self._copies.values()))
        self._check_optimizer()
        self._averaging: GradientAveraging = self._all_reduce
        if compression is not None:
            names = {parameter: name for name, parameter in trained.items()}
            self._averaging = CompressedAveraging(
                compression, names, backend, feedback=residual or NO_RESIDUALS
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
        whole = super().bytes_sent
        return whole if self._averaging is self._all_reduce else whole + self._averaging.bytes_sent

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters. Later only outer steps change the copies: these stay the same on all
        ranks, whatever becomes of a rank's parameters.
        """
        for name, parameter in self._trained.items():
            self._copies[name].copy_(parameter)

    @torch.no_grad()
    def sync(self, label: str, *, whole: bool) -> None:
        """Average the outer gradients, step, and copy. If these gradients are not finite there is
        no step: all parameters are as they were when the period began.

        Raises `DesyncError` if the copies are not the same on all ranks: their hashes are compared,
        in a message of 16 bytes.
        """
        if self._residual is not None and self._backend.world_size == 1:
            return

        def put(place: Tensor, parameter: Tensor) -> None:
            torch.sub(self._copy_of[parameter], parameter, out=place)  # type: ignore[index]

        residual = None if whole else self._residual
        averaging = self._all_reduce if whole and self._residual is not None else self._averaging
        flats = averaged(self._trained.values(), averaging, self._backend, label=label, put=put)
        check_agreement(
            [describe_with_values(name, copy) for name, copy in self._copies.items()],
            self._backend,
            op=f"{self._who}, parameters as they were after the last sync",
            remedy="Load the same state on every rank: that of a checkpoint, or one that was taken "
            "right after sync()",
        )
        finite = all(is_finite(flat.flat) for flat in flats)
        if finite:
            for flat in flats:
                for parameter, gradient in flat.views():
                    self._copy_of[parameter].grad = gradient  # type: ignore[index]
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.skipped += 1
            log.warning(
                "rank %d: %s: %s is skipped on every rank, and parameters are those of the one "
                "before: they were not finite: %s. That rank's own optimizer may keep what is not "
                "finite: give it a new one",
                self._backend.rank,
                self._who,
                "an outer step" if self._residual is None else "a sync",
                self._not_finite(),
            )
        for name, parameter in self._trained.items():
            parameter.copy_(self._copies[name])
            if residual is not None:
                left = residual.take(name)
                if finite:
                    parameter.sub_(left)
        self.alike = residual is None or not finite

    # State: the outer optimizer's is the same on every rank.
    #
    # outer@all.parameter.<name>          a parameter as it was when the period began
    # outer@all.state.<key>.<name>        what the optimizer keeps for it: a tensor, or a number
    # outer@all.option.<group>.<key>      a number of a parameter group, such as the learning rate

    def own_state(self, *, apart: bool) -> dict[str, Tensor]:
        """The outer optimizer's, the copies while they are needed, and the compressor's.

        Raises `UnsupportedObjectError` if the optimizer keeps something that is no tensor and no
        number.
        """
        state: dict[str, Tensor] = {}
        for name, copy in self._copies.items() if apart else ():
            state[f"{_PREFIX}parameter.{name}"] = copy.detach().clone()
        for name, copy in self._copies.items():
            for key, value in self.optimizer.state.get(copy, {}).items():
                if value is not None:
                    state[f"{_PREFIX}state.{key}.{name}"] = _as_tensor(value, f"{key} of {name}")
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, (bool, int, float, Tensor)):
                    state[f"{_PREFIX}option.{number}.{key}"] = _as_tensor(value, key)
        return state | (own_state(self.compression, self._backend) if self.compression else {})

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Continue from there. Returns the copies, if they are in it. Without any state nothing is
        done. Raises `SizeMismatchError` for that of another model.
        """
        sizes = {name: parameter.numel() for name, parameter in self._trained.items()}
        load_own(self.compression, state, self._backend, sizes_of=sizes)
        entries = []
        for key, value in state.items():
            if key.startswith(_PREFIX):
                kind, _, rest = key[len(_PREFIX) :].partition(".")
                first, name = ("", rest) if kind == "parameter" else rest.split(".", 1)
                entries.append((kind, first, name, value))
                if kind != "option":
                    self._check_fits(name, value, by_shape=kind == "parameter")
        if entries:
            self.optimizer.state.clear()
        for kind, first, name, value in entries:
            if kind == "parameter":
                self._copies[name].copy_(value)
            elif kind == "state":
                self.optimizer.state[self._copies[name]][first] = value.clone()
            else:
                self._load_option(int(first), name, value)
        return self._copies if any(kind == "parameter" for kind, *_ in entries) else {}

    def _load_option(self, number: int, option: str, value: Tensor) -> None:
        if number >= len(self.optimizer.param_groups):
            return
        group = self.optimizer.param_groups[number]
        if isinstance(group.get(option), Tensor):
            group[option].copy_(value)
        elif option in group:
            group[option] = value.item()

    def _check_fits(self, name: str, value: Tensor, *, by_shape: bool) -> None:
        copy = self._copies.get(name)
        if copy is None or (by_shape and value.shape != copy.shape):
            has = f"has shape {list(copy.shape)}" if copy is not None else "is not there"
            rank = self._backend.rank
            raise SizeMismatchError(
                f"rank {rank}: DiLoCo: the state dict has an outer {name} of shape "
                f"{list(value.shape)}, and in this model it {has}: it is the state of another "
                "model",
                rank=rank,
            )


_PREFIX = "outer@all."


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

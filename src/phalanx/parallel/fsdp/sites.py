"""The places of a model where parameters are: the shards to look at, full ones to compute with.

A module has its parameters in a dictionary that is asked only for what is not among its plain
attributes. So a full parameter that is one stands in for the shard, which stays where it is: names,
`parameters()` and the optimizer never see anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from phalanx.errors import MisuseError
from phalanx.parallel.fsdp.unit import Unit
from phalanx.parallel.fsdp.units import Site
from phalanx.parallel.fsdp.whole import Whole


class _Place(NamedTuple):
    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    whole: Whole
    address: int  # of the shard, which the parameter is a view of


class Sites:
    """All places of one model, on one rank."""

    def __init__(
        self, sites: Mapping[str, Site], wholes: Mapping[nn.Parameter, Whole], rank: int
    ) -> None:
        self._places = [
            _Place(
                *(name, site.module, site.attribute, site.parameter, wholes[site.parameter]),
                site.parameter.data_ptr(),
            )
            for name, site in sites.items()
        ]
        self._rank = rank
        # They hold a list of their parameters besides.
        self._recurrent = [m for m in {p.module for p in self._places} if isinstance(m, nn.RNNBase)]

    def show(self) -> None:
        """Let modules compute with full parameters. `MisuseError` if one was replaced.

        They need gradients if the shards do now.
        """
        for place in self._places:
            module, parameter = place.module, place.parameter
            if (
                module._parameters.get(place.attribute) is not parameter
                or parameter.data_ptr() != place.address
            ):
                self._refuse(place)
            if parameter.requires_grad is not place.whole.requires_grad:
                place.whole.requires_grad_(parameter.requires_grad)
            place.module.__dict__[place.attribute] = place.whole
        self._list_again()

    def hide(self) -> None:
        """Let everybody see shards."""
        for place in self._places:
            place.module.__dict__.pop(place.attribute, None)
        self._list_again()

    @contextmanager
    def shown(self, units: Sequence[Unit]) -> Iterator[None]:
        """Show full parameters of all units, which are there."""
        self.show()
        for unit in units:
            unit.presence.now = True
        try:
            yield
        finally:
            for unit in units:
                unit.presence.now = False
            self.hide()

    def check_complete(self, module: nn.Module) -> None:
        """Raise `MisuseError` for parameters that came after the model was cut."""
        known = {place.parameter for place in self._places}
        late = [name for name, p in module.named_parameters() if p not in known]
        if late:
            raise MisuseError(
                f"rank {self._rank}: FSDP: {', '.join(late)} came to the module after FSDP was "
                "built, and would be on each rank by itself: build it when the module is complete",
                rank=self._rank,
                op="FSDP",
            )

    def _list_again(self) -> None:
        for module in self._recurrent:
            names: Sequence[str] = module._flat_weights_names
            module._flat_weights = [getattr(module, name, None) for name in names]

    def _refuse(self, place: _Place) -> None:
        self.hide()
        raise MisuseError(
            f"rank {self._rank}: FSDP: the parameter {place.name} was replaced after FSDP was "
            "built, or its .data was (as by .half() or .double()), so it is no shard any more: "
            "change values with load_state_dict or summon_full_params, or build FSDP after the "
            "change",
            rank=self._rank,
            op="FSDP",
        )

"""PHALANX_INSTEAD_OF_GLOO=1: programs that name Gloo in their own code get Phalanx.

Accelerate, Hugging Face's Trainer and others ask for "gloo" by themselves, and refuse another name.
`init_process_group` and `new_group` make groups by one function of torch's, which is wrapped here.
`get_backend()` says "phalanx" afterwards, which is true.
"""

from __future__ import annotations

import inspect
import logging
from functools import wraps
from typing import Any

log = logging.getLogger("phalanx")

GLOO = frozenset({"gloo", "cpu:gloo"})
NOTHING = "undefined"  # torch's default without a name


def take_place(c10d: Any, name: str) -> None:
    """Make the backend `name` whenever torch is asked for Gloo. May be repeated.

    c10d   torch's module that makes process groups
    """
    helper = c10d._new_process_group_helper
    if getattr(helper, "instead_of_gloo", False):
        return
    parameters = inspect.signature(helper)
    c10d.Backend.default_device_backend_map["cpu"] = name

    @wraps(helper)
    def make(*args: Any, **kwargs: Any) -> Any:
        import torch  # noqa: PLC0415 - this module is imported while torch is

        given = parameters.bind(*args, **kwargs)
        asked = str(given.arguments["backend"])
        no_accelerator = torch._C._get_accelerator().type == "cpu"
        if asked in GLOO or (asked == NOTHING and no_accelerator):
            given.arguments["backend"] = c10d.Backend(name)
            is_world = not given.arguments["global_ranks_in_group"]
            if is_world and given.arguments["group_rank"] == 0:
                what = "no backend" if asked == NOTHING else repr(asked)
                log.warning(
                    "the program asked torch.distributed for %s and gets %r "
                    "(PHALANX_INSTEAD_OF_GLOO=1)",
                    what,
                    name,
                )
        return helper(*given.args, **given.kwargs)

    make.instead_of_gloo = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make

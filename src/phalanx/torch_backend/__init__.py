"""`torch.distributed.init_process_group("phalanx")`: stock PyTorch programs on Phalanx.

    torch.distributed.init_process_group("phalanx")     nothing to import
    import phalanx.torch_backend                        where entry points are not looked at

torch calls `register` at the end of `import torch`, in every program of the environment. So this
module imports nothing of Phalanx, and `register` never raises.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["register"]

NAME = "phalanx"


def register() -> None:
    """Tell torch how process groups named "phalanx" are made. Any number of times.

    It does not raise, which would break `import torch`: the log says what goes wrong. A backend of
    that name that someone else has registered stays, and is what torch makes.
    """
    try:
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        known = c10d.Backend._plugins.get(NAME.upper())
        if known is None:
            c10d.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
        elif known.creator_fn is not create:
            raise RuntimeError(f"another backend has the name {NAME!r}: {known.creator_fn}")
        if os.environ.get("PHALANX_INSTEAD_OF_GLOO", "") == "1":
            from phalanx.torch_backend.instead_of_gloo import take_place  # noqa: PLC0415

            take_place(c10d, NAME)
    except Exception:
        import logging  # noqa: PLC0415

        logging.getLogger(NAME).warning("torch does not take the backend %r", NAME, exc_info=True)


def create(options: Any, backend_options: object = None) -> Any:
    """Make a process group, as torch asks for one: what `register` gives to torch."""
    from phalanx.torch_backend.creation import create_group  # noqa: PLC0415

    return create_group(options, backend_options)


register()

"""`torch.distributed.init_process_group("phalanx")`: stock PyTorch programs on Phalanx.

torch.distributed.init_process_group("phalanx")     nothing to import
import phalanx.torch_backend                        where entry points are not looked at
"""

from __future__ import annotations

from phalanx import _register_with_torch as register

__all__ = ["register"]

register()

"""`MpiBackend`: ranks that MPI has started."""

from __future__ import annotations

from typing import Any

from phalanx.backends.base import DEFAULT_TIMEOUT
from phalanx.backends.mpi.formation import duplicate, hosts
from phalanx.backends.mpi.imported import import_mpi
from phalanx.backends.mpi.library import MpiLibrary

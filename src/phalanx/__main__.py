"""`python -m phalanx` is `phalanx`."""

from __future__ import annotations

from phalanx.cli.main import main

main()

"""Runs the `phalanx` command in this process."""

from __future__ import annotations

from phalanx.launch.signals import end_at_interrupt


def main() -> None:
    """Run the command line of this process; ends it with the command's exit code.

    2: it cannot be done as asked, and stderr says why. 130: Ctrl-C. While the command is being
    imported Ctrl-C ends the process without a word, rather than with a traceback of imports. When
    a command begins, `app` lets it raise KeyboardInterrupt again; `run` has handlers of its own.
    """
    end_at_interrupt()
    from phalanx.cli.app import app  # noqa: PLC0415 -- it takes a moment
    from phalanx.launch.command import run_app  # noqa: PLC0415

    run_app(app, "phalanx")

"""Runs the `phalanx` command in this process."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line of this process; ends it with the command's exit code.

    2: it cannot be done as asked, and stderr says why. 130: Ctrl-C. While the command is being
    imported Ctrl-C ends the process without a word, rather than with a traceback of imports. When
    a command begins, `app` lets it raise KeyboardInterrupt again; `run` has handlers of its own.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.cli.app import app  # noqa: PLC0415 -- it takes a moment
    from phalanx.launch.command import run_app  # noqa: PLC0415

    run_app(app, "phalanx")


if __name__ == "__main__":
    main()

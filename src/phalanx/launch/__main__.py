"""`python -m phalanx.launch` is `phalanx run`, without the other commands of `phalanx`."""

from __future__ import annotations

from phalanx.launch.signals import end_at_interrupt


def main() -> None:
    """Run the command line of this process; ends it with the command's exit code."""
    end_at_interrupt()
    import typer  # noqa: PLC0415 -- it takes a moment, as what it runs

    from phalanx.launch.command import run_app, run_command  # noqa: PLC0415

    app = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )
    app.command(
        context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
    )(run_command)
    run_app(app, "python -m phalanx.launch")


main()

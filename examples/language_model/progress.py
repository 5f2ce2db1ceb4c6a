"""What rank 0 shows while training: a bar in a terminal, lines anywhere else."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from language_model.history import HeldOutPoint, TrainPoint

FEW = 5  # steps from which the time of the others is estimated; the first one takes longer
SHORT = 10.0  # seconds of which nothing is said


class TrainingProgress:
    """Shows the points of a run as they come; nothing at all unless `visible`."""

    def __init__(self, steps: int, *, done: int, visible: bool) -> None:
        self._console = Console(quiet=not visible, highlight=False, soft_wrap=True)
        self._steps = steps
        self._left = steps - done
        self._times: list[float] = []  # when steps were done, the first few
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if visible and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str = "") -> None:
        """Show a line."""
        self._console.print(line, markup=False)

    def advance(self) -> None:
        """One more step is done."""
        self._left -= 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif len(self._times) <= FEW:
            self._times.append(monotonic())
            if len(self._times) > FEW:
                self._say_how_long((self._times[-1] - self._times[0]) / FEW * self._left)

    def _say_how_long(self, seconds: float) -> None:
        if seconds >= SHORT:
            minutes, rest = divmod(round(seconds), 60)
            took = f"{minutes} min {rest} s" if minutes else f"{rest} s"
            self.say(f"{self._left} steps to go: about {took} on this machine")

    def trained(self, point: TrainPoint) -> None:
        """Some steps are done; this is their mean."""
        measured = (
            f"loss {point.loss:.3f}  {point.tokens_per_second:,.0f} tokens/s  "
            f"{point.communication:.0%} communicating"
        )
        if self._bar is not None:
            self._bar.update(self._task, description=measured)
        else:
            width = len(str(self._steps))
            self.say(f"step {point.step:{width}}/{self._steps}  {measured}")

    def evaluated(self, point: HeldOutPoint) -> None:
        """The held-out loss after some steps."""
        self.say(
            f"held out, after {point.step} steps: {point.loss:.3f} nats a byte "
            f"({point.bits:.3f} bits)"
        )

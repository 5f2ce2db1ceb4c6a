"""All checks, in order, and what they found."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.launch.doctor.backends import BACKEND_CHECKS
from phalanx.launch.doctor.finding import Checks, Finding, fail
from phalanx.launch.doctor.machine import MACHINE
from phalanx.launch.doctor.network import NETWORK
from phalanx.launch.doctor.sharing import SHARING
from phalanx.launch.doctor.software import SOFTWARE
from phalanx.launch.doctor.variables import VARIABLES

__all__ = ["SUBJECTS", "Line", "as_markdown", "examine"]

SUBJECTS: Mapping[str, Checks] = MappingProxyType(
    {
        "Software": SOFTWARE,
        "Machine": MACHINE,
        "Environment": VARIABLES,
        "Network": NETWORK,
        "Memory between processes": SHARING,
        "Backends": BACKEND_CHECKS,
    }
)


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    subject: str
    check: str
    finding: Finding


def examine(subjects: Mapping[str, Checks] = SUBJECTS) -> Iterator[Line]:
    """Run all checks, one after the other; yield each line when its check is done.

    Takes some seconds: two ranks are started for every backend. A check that raises has failed.
    """
    for subject, checks in subjects.items():
        for name, check in checks.items():
            try:
                finding = check()
            except Exception as error:
                said = traceback.format_exception_only(error)[-1].strip()
                finding = fail(f"the check failed: {said}", "please report it with all of this")
            yield Line(subject, name, finding)


def as_markdown(lines: list[Line]) -> Iterator[str]:
    """Yield the report as Markdown, to paste into a bug report, a line each."""
    subject = ""
    for line in lines:
        if line.subject != subject:
            subject = line.subject
            yield f"\n### {subject}\n"
        finding = line.finding
        mark = f"**{finding.status.upper()}** " if finding.status in ("warn", "fail") else ""
        hint = f" -- {finding.hint}" if finding.hint else ""
        yield f"- {mark}{line.check}: {finding.what}{hint}"

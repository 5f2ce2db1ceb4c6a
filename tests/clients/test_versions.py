"""The versions in the tables of the documents are those that the tests run with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from browser import chromium, why_not
from files_and_loggers import CHROMIUM, FILES_AND_LOGGERS
from tables import pinned
from trainers import TRAINERS

PACKAGES = sorted({row.package for row in (*TRAINERS, *FILES_AND_LOGGERS)} - {""})


@pytest.mark.parametrize("package", PACKAGES)
def test_the_version_is_that_of_the_constraints(package: str) -> None:
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert installed.partition("+")[0] == pinned()[package]  # torch says "+cpu"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_browser_is_the_one_that_was_tried_or_a_newer_one() -> None:
    with chromium() as browser:
        running = [int(part) for part in browser.version.split(".")]
    assert running >= [int(part) for part in CHROMIUM.split(".")]

"""A rank with the right token that sends nonsense: the short form of `link_fuzz.py`."""

from __future__ import annotations

import logging

import pytest
from link_fuzz import fuzz


def test_a_rank_that_sends_nonsense_is_named_and_does_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="phalanx")
    assert fuzz(1, rounds=150) == 150

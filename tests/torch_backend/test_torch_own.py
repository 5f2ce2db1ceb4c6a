"""torch's own tests of its backends: see torch_own.py."""

from __future__ import annotations

from torch_own import PASSES, run


def test_what_passes_of_the_tests_that_torch_has_for_gloo_is_what_the_list_says() -> None:
    results = run()
    assert {name: result for name, result in results.items() if result not in ("", "skipped")} == {}
    assert sorted(set(PASSES.read_text().split()) - {n for n in results if not results[n]}) == []

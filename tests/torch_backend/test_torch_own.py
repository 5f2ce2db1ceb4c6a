"""torch's own tests of its backends: see torch_own.py."""

from __future__ import annotations

from torch_own import BY_NAME, PASSES, run


def test_what_passes_of_the_tests_that_torch_has_for_gloo_is_what_the_list_says() -> None:
    results = run()
    assert {name: result for name, result in results.items() if result not in ("", "skipped")} == {}
    expected = set(PASSES.read_text().split()) - BY_NAME
    assert sorted(expected - {name for name in results if not results[name]}) == []

"""The pages are plain English, say each thing once, and are two links from home at most."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

from plain import Measure, measure, paragraphs, sentences

DOCS = sorted(name for name in PAGES if name.startswith("docs/"))
GUIDES = ["README.md", *(name for name in DOCS if "reference/" not in name)]
INSIDE = {"docs/design.md"}  # for those who read the code: it may be long
REPEATED = 8  # words: shorter paragraphs may stand on two pages


@pytest.mark.parametrize("name", GUIDES)
def test_a_page_is_plain_english(name: str) -> None:
    faults = measure(PAGES[name]).faults()
    assert [fault for fault in faults if name not in INSIDE or "words, more" not in fault] == []


def test_no_paragraph_stands_on_two_pages() -> None:
    pages: dict[str, set[str]] = {}
    for name in GUIDES:
        for text in paragraphs(PAGES[name]):
            if len(text.split()) >= REPEATED:
                pages.setdefault(text, set()).add(name)
    assert {text: names for text, names in pages.items() if len(names) > 1} == {}


def test_every_guide_is_two_links_from_home_at_most() -> None:
    seen = {"docs/index.md"}
    for _ in range(2):
        for name in sorted(seen):
            for link in re.findall(r"\]\(([^)#]+\.md)", PAGES[name]):
                target = ((ROOT / name).parent / link).resolve()
                if target.is_file():
                    seen.add(str(target.relative_to(ROOT)))
    assert [name for name in DOCS if name not in seen and "reference/" not in name] == []


def test_the_measure_finds_what_it_is_for() -> None:
    long = "This is one of " + "many " * 40 + "words."
    assert [len(each.split()) for each in measure(f"Short.\n\n{long}\n").longest] == [45]
    hard = "Heterogeneous parallelization necessitates considerable infrastructural sophistication."
    assert any("Flesch" in fault for fault in measure(hard).faults())
    assert any("per sentence" in fault for fault in measure("word " * 20 + ".").faults())
    assert Measure(2000, 10.0, [], 80.0).faults() == ["2000 words, more than 1500"]
    page = (
        "# Title\n\nOne `a b c` two. [Three](x.md) four!\n\n```python\nx = 1.\n```\n\n| a | b |\n"
    )
    assert sentences(page) == ["One code two.", "Three four!"]

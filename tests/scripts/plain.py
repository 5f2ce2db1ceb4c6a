"""How plain the running text of a page is: the length of its sentences, and Flesch's reading ease.

    python tests/scripts/plain.py docs/sharded.md ...

Running text is that of paragraphs and list items: no code, tables, headings, or link targets.
Flesch 1948: 206.835 - 1.015 * words per sentence - 84.6 * syllables per word.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEAN, LONGEST, EASE, WORDS = 18.0, 35, 50.0, 1500


class Measure(NamedTuple):
    """What a page's running text comes to."""

    words: int
    mean: float
    longest: list[str]
    ease: float

    def faults(self) -> list[str]:
        """What is not as it should be, in words."""
        found = [f"{len(each.split())} words: {each}" for each in self.longest]
        if self.mean > MEAN:
            found.append(f"{self.mean:.1f} words per sentence, more than {MEAN:g}")
        if self.ease < EASE:
            found.append(f"Flesch reading ease {self.ease:.0f}, less than {EASE:g}")
        if self.words > WORDS:
            found.append(f"{self.words} words, more than {WORDS}")
        return found


def paragraphs(page: str) -> Iterator[str]:
    """The paragraphs and list items of a page, each as one line, without marks."""
    page = re.sub(r"^( *)```.*?^\1```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->|<[^>]+>", "", page, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", page):
        lines = [line for line in block.strip().splitlines() if not line.lstrip().startswith("|")]
        text = " ".join(line.strip() for line in lines)
        if not text or text.startswith(("#", "![", "---", "===")):
            continue
        text = re.sub(r"^(?:[-*]|\d+\.) ", "", text)
        if text.startswith("refused: "):  # the product's words, which a page quotes
            continue
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        yield re.sub(r"\*\*|__", "", text)


def sentences(page: str) -> list[str]:
    """The sentences of the running text; a piece of code counts as one word of one syllable."""
    found = []
    for text in paragraphs(page):
        plain = re.sub(r"`+[^`]*`+", "code", text)
        for each in re.split(r"(?<=[.!?])\s+(?=[\"(A-Z]|code)", plain):
            if re.search(r"[A-Za-z]", each):
                found.append(each.strip())
    return found


def syllables(word: str) -> int:
    """About how many syllables an English word has."""
    word = re.sub(r"[^a-z]", "", word.lower())
    count = len(re.findall(r"[aeiouy]+", word))
    if word.endswith("e") and not word.endswith(("le", "ee")) and count > 1:
        count -= 1
    return max(1, count)


def measure(page: str) -> Measure:
    """Measure a page's running text."""
    each = sentences(page)
    words = [w for sentence in each for w in sentence.split() if re.search(r"[A-Za-z0-9]", w)]
    mean = len(words) / max(1, len(each))
    ease = 206.835 - 1.015 * mean - 84.6 * sum(map(syllables, words)) / max(1, len(words))
    return Measure(len(words), mean, [s for s in each if len(s.split()) > LONGEST], ease)


def main() -> int:
    failed = False
    for name in sys.argv[1:]:
        found = measure(Path(name).read_text())
        faults = found.faults()
        words = f"{found.words} words, {found.mean:.1f} a sentence, ease {found.ease:.0f}"
        print(f"{name}: {words}" + "".join(f"\n    {fault}" for fault in faults))
        failed = failed or bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

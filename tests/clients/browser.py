"""Debian's Chromium, driven by Playwright, which downloads no browser of its own here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds
SHOTS = "PHALANX_SCREENSHOTS"
"""Names the folder to which screenshots of the documents go; without it none are made."""


def why_not() -> str:
    """Why there is no browser here, or ""."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install 'phalanx[clients]'"
    if shutil.which("chromium") is None:
        return "there is no chromium: apt-get install chromium"
    return ""


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if os.getuid() == 0 else [],
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, address: str, *, theme: str = "light", **more: Any) -> Iterator[Any]:
    """A page at an address. What it says on its console, or fails with, fails the test."""
    size = {"width": 1400, "height": 1000}
    page = browser.new_page(color_scheme=theme, viewport=size, **more)
    page.set_default_timeout(PATIENCE * 1e3)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    try:
        page.goto(address)
        yield page
        assert not said
    finally:
        page.close()


def screenshot(page: Any, name: str) -> None:
    folder = os.environ.get(SHOTS, "")
    if folder:
        from PIL import Image

        path = Path(folder) / name
        page.screenshot(path=str(path))
        of_256_colours = (
            Image.open(path)
            .convert("RGB")
            .quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        )
        of_256_colours.save(path, optimize=True)  # a third of the bytes


CONTRASTS = """() => {
    const channels = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(value => {
        value /= 255;
        return value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
    }).reduce((sum, value, place) => sum + value * [.2126, .7152, .0722][place], 0);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = channels(getComputedStyle(element).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
            if (colour[3] !== 0) throw new Error("a background that is half seen");
        }
        throw new Error("no background");
    };
    const found = {};
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
        if (!text || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
        const colours = [channels(getComputedStyle(element).color), behind(element)];
        const [one, other] = colours.map(light);
        const contrast = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
        found[text] = Math.min(contrast, found[text] ?? 99);
    }
    return found;
}"""
"""For each text of a page how much it stands out from what is behind it, by WCAG 2: 1 to 21."""


def lowest_contrast(page: Any) -> tuple[float, str]:
    contrasts: dict[str, float] = page.evaluate(CONTRASTS)
    assert contrasts
    return min((contrast, text) for text, contrast in contrasts.items())


def focused(page: Any) -> str:
    """What has the focus, in words."""
    return str(
        page.evaluate(
            """() => {
                const at = document.activeElement;
                return at.id || at.textContent.trim() && at.tagName === "BUTTON" && at.textContent
                    || at.className || at.tagName;
            }"""
        )
    )

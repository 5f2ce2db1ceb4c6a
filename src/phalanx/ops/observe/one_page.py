"""A page in one file, from `page.html`, `page.css` and `page.js` of a package.

    page.html   $style, $script and $policy stand for the two others and for the page's rights
common.*    the beginning of every page's style and script

The policy (Content-Security-Policy) names the hashes of the style and of the script. So a browser
runs nothing else, in spite of any text in the page; and the page fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from string import Template

# Control characters, those that change the direction of text, and halves of characters.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def assemble(package: str, *, more_policy: str = "", **texts: str) -> tuple[str, str]:
    """Return the page of a package, and its policy.

    `texts` are put in as HTML. `more_policy` has further rights of the page.
    """
    here = files(package)
    style, script = (
        files("phalanx.ops.observe").joinpath(f"common.{kind}").read_text("utf-8")
        + here.joinpath(f"page.{kind}").read_text("utf-8")
        for kind in ("css", "js")
    )
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'{more_policy}"
    )
    template = Template(here.joinpath("page.html").read_text("utf-8"))
    return template.substitute(texts, style=style, script=script, policy=policy), policy


def as_text(value: object) -> str:
    """Return it as HTML's text or attribute; write out invisible characters."""
    return html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value)))


def digit(share: float) -> str:
    """Return a share, from 0 to 1, as the digit that `common.js` reads: 0 to z, z for all."""
    return "0123456789abcdefghijklmnopqrstuvwxyz"[round(min(share, 1.0) * 35)]


def _hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"

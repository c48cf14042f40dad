"""Formulas between dollar signs become MathML when the pages are built, so that they need no script and no network."""

import re

from latex2mathml.converter import convert

_BLOCKS = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<![\\$`\w])\$([^$\n`]+)\$(?![\w$])")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_) -> str:
    """A page with its formulas turned."""
    parts = _CODE.split(markdown)  # code and what is between it take turns
    return "".join(part if i % 2 else _formulas(part) for i, part in enumerate(parts))


def _formulas(text: str) -> str:
    text = _BLOCKS.sub(lambda found: f"<p>{convert(found[1], display='block')}</p>", text)
    return _INLINE.sub(lambda found: convert(found[1]), text)

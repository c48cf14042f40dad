"""Put the tables and the picture of ``benchmarks/results/arena/arena.json`` into docs/arena.md.

python benchmarks/arena_pages.py
"""

from __future__ import annotations

import json
from pathlib import Path

from eigenoise import storage
from eigenoise.reporting.tables import markdown
from eigenoise.studies.arena import show

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results" / "arena"
MARK = "## Results\n"


def tables() -> str:
    """All tables and the picture, in Markdown."""
    content = json.loads((FOLDER / "arena.json").read_text())
    return f"{MARK}\n![Test log-likelihood over CPU seconds](images/arena.png)\n\n{markdown(show.grids(content))}"


def page(text: str) -> str:
    """The page with the current tables below what is written by hand."""
    return text.split(MARK)[0] + tables()


def main() -> None:
    content = json.loads((FOLDER / "arena.json").read_text())
    show.draw(content, ROOT / "docs" / "images")
    path = ROOT / "docs" / "arena.md"
    storage.write_text(path, page(path.read_text()))


if __name__ == "__main__":
    main()

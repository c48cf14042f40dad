"""Write the tables and pictures of ``benchmarks/results/bench/bench.json`` and put them into the pages.

python benchmarks/bench_pages.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from eigenoise import storage
from eigenoise.reporting.tables import markdown
from eigenoise.studies.bench import show

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results" / "bench"
SHORT = [
    "noisy EK-FAC",
    "noisy K-FAC",
    "noisy Adam",
    "BBB",
    "EK-FAC",
    "K-FAC",
    "IVON (ivon-opt)",
]
SHORT += ["BBB (bayesian-torch)", "SINGD dense, every 10 (singd)"]


def main() -> None:
    results = json.loads((FOLDER / "bench.json").read_text())
    storage.write_text(FOLDER / "bench.md", markdown(show.grids(results)))
    show.pictures(results, ROOT / "docs" / "images")
    replace(ROOT / "docs" / "speed.md", show.summary(results).markdown())
    replace(ROOT / "README.md", show.summary(results, ["a", "b", "c"], SHORT).markdown())


def replace(page: Path, table: str) -> None:
    """Put ``table`` in the place of the page's table of the same first column."""
    body = "\n".join(table.splitlines()[2:]) + "\n"
    head = re.escape(body.split("|")[1].strip())
    text = re.sub(
        rf"(SUMMARY\n|\| {head} \|.*?\n(?=\n))", lambda found: body, page.read_text(), count=1, flags=re.DOTALL
    )
    storage.write_text(page, text)


if __name__ == "__main__":
    main()

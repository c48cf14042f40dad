"""Damage files of every kind in a thousand ways each and read them: none may do more than be refused.

    python benchmarks/fuzz.py [--cases 1000] [--show]

Counts are written to benchmarks/results/fuzz.json. What counts as damage, and as harm, is in tests/fuzzing.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import fuzzing
from eigenoise import storage
from eigenoise.studies.data import images
from eigenoise.studies.runner import environment

OUT = Path(__file__).parent / "results" / "fuzz.json"


def show(results: dict) -> None:
    print(f"{'files of':20} {'cases':>6} {'understood':>11} {'refused':>8}")
    for name, counts in results["readers"].items():
        print(f"{name:20} {sum(counts.values()):6} {counts['understood']:11} {counts['refused']:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    if not args.show:
        images.RECORDS = 1  # small archives
        found = {}
        for name in track(fuzzing.READERS, "readers"):
            with tempfile.TemporaryDirectory() as folder:
                found[name] = fuzzing.fuzz(name, args.cases, args.seed, Path(folder))
        storage.write_json(OUT, {"readers": found, "seed": args.seed, "environment": environment()})
    show(json.loads(OUT.read_text()))


if __name__ == "__main__":
    main()

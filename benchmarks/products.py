"""Which of torch's two libraries multiplies a layer's matrix by its basis faster on this machine: MKL or oneDNN.

Both do the same product in turns, on one thread; shown is oneDNN's time as a part of MKL's, of medians, for ``rows``
times a basis of ``columns`` (into it, W·Q) or its transpose (back, W·Qᵀ). ``linalg.matmul`` is decided by this.

    python benchmarks/products.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from eigenoise.linalg import LARGE, matmul
from eigenoise.runs import environment

ROWS, COLUMNS = (64, 256, 1024), (1024, 1153, 2304, 2305, 4609)


def ratio(left: Tensor, right: Tensor, rounds: int) -> float:
    """Time of ``linalg.matmul`` over that of torch's own product."""
    ways = {"ours": lambda: matmul(left, right), "theirs": lambda: left @ right}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, product in ways.items():
            start = time.process_time()
            product()
            times[name].append(time.process_time() - start)
    return statistics.median(times["ours"]) / statistics.median(times["theirs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print("| columns | " + " | ".join(f"{rows} rows, into | back" for rows in ROWS) + " |")
    print("|---" * (1 + 2 * len(ROWS)) + "|")
    for columns in COLUMNS:
        basis, cells = torch.randn(columns, columns), []
        for rows in ROWS:
            if rows * columns**2 < LARGE:
                raise SystemExit(f"{rows} rows times {columns} columns are too small to go to oneDNN")
            left = torch.randn(rows, columns)
            for way, right in (("into", basis), ("back", basis.mT)):
                part = ratio(left, right, arguments.rounds)
                found.append({"columns": columns, "rows": rows, "way": way, "ratio": part})
                cells.append(f"{part:.2f}")
        print(f"| {columns} | {' | '.join(cells)} |", flush=True)
    if arguments.json:
        results = {"environment": environment(), "rounds": arguments.rounds, "ratios": found}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

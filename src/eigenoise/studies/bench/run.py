"""The whole benchmark as parts, each of which adds to one result."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigenoise.studies.bench import growth as growing
from eigenoise.studies.bench import peers as others
from eigenoise.studies.bench.cases import CASES, Case
from eigenoise.studies.bench.measure import peak_memory, ratios
from eigenoise.studies.bench.steps import MORE, OURS, MakeStepper, Stepper
from eigenoise.studies.runner import environment

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        title: what is measured.
        steps: how often ``run`` calls back.
        run: adds to the results, calling back as it goes.
    """

    title: str
    steps: int
    run: Callable[[dict[str, Any], OnStep], None]


def parts(names: Sequence[str], *, rounds: int, peers: bool, memory: bool, growth: bool) -> Iterator[Part]:
    """Yields the parts for the cases ``names``; for the arguments see the command."""
    for name in names:
        methods: dict[str, MakeStepper] = {**OURS, **MORE.get(name, {})}
        if peers:
            methods |= {label: functools.partial(_peer, label) for label in others.installed()}
        yield Part(f"({name}) time", rounds * len(methods), functools.partial(_time, name, methods, rounds))
        if memory:
            labels = ["SGD", *methods]
            yield Part(f"({name}) memory", len(labels), functools.partial(_memory, name, labels))
    if growth:
        for axis, about in growing.AXES.items():
            yield Part(f"growth: {about.title}", len(about.sizes), functools.partial(_growth, axis, rounds))


def begun(path: Path) -> dict[str, Any]:
    """Returns what was measured before in the same environment and is in the file ``path``.

    Raises:
        ValueError: if the file is of another environment or cannot be read; it is left unchanged.
    """
    if not path.exists():
        return {"environment": environment(), "cases": {}}
    try:
        results = json.loads(path.read_text())
        before, _ = results["environment"], results["cases"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of this benchmark: move it away or choose another folder") from error
    if before != environment():
        raise ValueError(f"{path}: expected results of {environment()}, got {before}; choose another folder")
    return results


def _peer(label: str, case: Case) -> Stepper:
    try:
        step = others.installed()[label](case)
    except others.Unsupported:
        raise
    except Exception as error:  # such as an installation that does not fit this torch: all others are timed
        raise others.Unsupported(f"it fails with {type(error).__name__}: {error}") from error
    return Stepper(step, period=others.PERIODS.get(label, 1))


def _time(name: str, methods: Mapping[str, MakeStepper], rounds: int, results: dict[str, Any], on_step: OnStep) -> None:
    before = results["cases"].get(name, {})
    kept = {"memory": before["memory"]} if "memory" in before else {}  # until it is measured again
    results["cases"][name] = {**ratios(CASES[name](), methods, rounds, on_step), **kept}


def _memory(name: str, labels: Sequence[str], results: dict[str, Any], on_step: OnStep) -> None:
    peaks = results["cases"][name]["memory"] = {}
    for label in labels:
        if "reason" not in results["cases"][name]["methods"].get(label, {}):
            peaks[label] = peak_memory(name, label)
        on_step(label)


def _growth(axis: str, rounds: int, results: dict[str, Any], on_step: OnStep) -> None:
    costs = {}
    for size, cost in growing.measure(growing.AXES[axis], rounds):
        costs[size] = cost
        on_step(str(size))
    kinds = next(iter(costs.values()))
    ms = {kind: [cost[kind] for cost in costs.values()] for kind in kinds}
    results.setdefault("growth", {})[axis] = {"sizes": list(costs), "ms": ms}

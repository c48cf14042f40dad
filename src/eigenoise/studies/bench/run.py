"""The whole benchmark as parts, each of which adds to one result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigenoise.studies.bench import growth as growing
from eigenoise.studies.bench import memory as remembering
from eigenoise.studies.bench import peers as others
from eigenoise.studies.bench.cases import CASES, Case
from eigenoise.studies.bench.measure import ratios
from eigenoise.studies.bench.steps import MORE, OURS, Stepper
from eigenoise.studies.runner import environment

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        title: what is measured.
        steps: how often ``run`` will call back.
        run: adds to the result, calling back as it goes.
    """

    title: str
    steps: int
    run: Callable[[dict[str, Any], OnStep], None]


def parts(names: Sequence[str], *, rounds: int, peers: bool, memory: bool, growth: bool) -> Iterator[Part]:
    """Parts for the cases ``names``; see the command for the arguments."""
    for name in names:
        methods: dict[str, Callable[[Case], Stepper]] = {**OURS, **MORE.get(name, {})}
        if peers:
            methods |= {label: _peer(label) for label in others.installed()}
        yield Part(f"({name}) time", rounds * len(methods), _timing(name, methods, rounds))
        if memory:
            labels = ["SGD", *OURS, *MORE.get(name, {}), *(others.installed() if peers else ())]
            yield Part(f"({name}) memory", len(labels), _memory(name, labels))
    if growth:
        for axis, about in growing.AXES.items():
            yield Part(f"growth: {about.title}", len(about.sizes), _growth(axis, rounds))


def begun(path: Path) -> dict[str, Any]:
    """What was measured before in the same environment and is in the file ``path``, or nothing.

    Raises:
        ValueError: if the file is of another environment or cannot be read; it is left as it is.
    """
    if not path.exists():
        return {"environment": environment(), "cases": {}}
    try:
        found = json.loads(path.read_text())
        before, _ = found["environment"], found["cases"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of this benchmark: move it away or choose another folder") from error
    if before != environment():
        raise ValueError(f"{path} was measured with {before}, this is {environment()}: choose another folder")
    return found


def _peer(label: str) -> Callable[[Case], Stepper]:
    def make(case: Case) -> Stepper:
        try:
            step = others.installed()[label](case)
        except others.Unsupported:
            raise
        except Exception as error:  # such as an installation that does not go with this torch: all others are timed
            raise others.Unsupported(f"it fails with {type(error).__name__}: {error}") from error
        return Stepper(step, period=others.PERIODS.get(label, 1))

    return make


def _timing(name: str, methods: dict[str, Callable[[Case], Stepper]], rounds: int) -> Callable[..., None]:
    def run(results: dict[str, Any], on_step: OnStep) -> None:
        before = results["cases"].get(name, {})
        kept = {"memory": before["memory"]} if "memory" in before else {}  # until it is measured again
        results["cases"][name] = {**ratios(CASES[name](), methods, rounds, on_step), **kept}

    return run


def _memory(name: str, labels: Sequence[str]) -> Callable[..., None]:
    def run(results: dict[str, Any], on_step: OnStep) -> None:
        found = results["cases"][name]["memory"] = {}
        for label in labels:
            if "reason" not in results["cases"][name]["methods"].get(label, {}):
                found[label] = remembering.peak(name, label)
            on_step(label)

    return run


def _growth(axis: str, rounds: int) -> Callable[..., None]:
    def run(results: dict[str, Any], on_step: OnStep) -> None:
        sizes, costs = [], []
        for size, cost in growing.measure(growing.AXES[axis], rounds):
            sizes.append(size)
            costs.append(cost)
            on_step(str(size))
        results.setdefault("growth", {})[axis] = {
            "sizes": sizes,
            "ms": {kind: [cost[kind] for cost in costs] for kind in costs[0]},
        }

    return run

"""Time and memory of a step: methods take turns with SGD, so that a noisy machine slows all alike."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from eigenoise.studies.bench.cases import CASES, Case
from eigenoise.studies.bench.peers import Unsupported, installed
from eigenoise.studies.bench.steps import MORE, OURS, Stepper, sgd

Progress = Callable[[str], None]


def ratios(
    case: Case, methods: Mapping[str, Callable[[Case], Stepper]], rounds: int, on_round: Progress = lambda name: None
) -> dict[str, Any]:
    """Measures the cost of each method's step on ``case``, amortised over its cycle, as a ratio to a step of SGD.

    In each round every method is timed right after SGD, by CPU time of one thread; a step of each kind that its cycle
    has is weighed by how often it comes.

    Args:
        case: network and batch.
        methods: makers of steppers by label.
        rounds: how often.
        on_round: called with a label whenever a method was timed.

    Returns:
        ``sgd_ms``, and for each method its median ``ratio``, ``quartiles``, median ``ms`` of a step, the ratio of the
        ``worst`` kind of step, and the ``kinds`` with their share and their ratio.
    """
    torch.manual_seed(0)
    base = sgd(case)
    made = {name: _try(make, case) for name, make in methods.items()}
    steppers = {name: one for name, one in made.items() if isinstance(one, Stepper)}
    reasons = {name: one for name, one in made.items() if isinstance(one, str)}
    for stepper in (base, *steppers.values()):
        warm_up(stepper)
    costs: dict[str, dict[str, list[float]]] = {name: {} for name in steppers}
    sgd_times = [_time(base, case.steps, 0)]
    for _ in range(rounds):
        for name, stepper in steppers.items():
            unit = _time(base, case.steps, 0)
            sgd_times.append(unit)
            for kind, (place, _share) in stepper.kinds().items():
                count = max(case.steps, stepper.period) if kind == "plain" else max(1, case.steps // 4)
                seconds = _time(stepper, count, place) / stepper.models
                costs[name].setdefault(kind, []).append(seconds / unit)
            on_round(name)
    scale = statistics.median(sgd_times)
    result: dict[str, Any] = {"title": case.title, "sgd_ms": 1e3 * scale, "rounds": rounds, "methods": {}}
    for name, stepper in steppers.items():
        shares = {kind: share for kind, (_, share) in stepper.kinds().items()}
        whole = [sum(shares[kind] * costs[name][kind][i] for kind in shares) for i in range(rounds)]
        kinds = {kind: {"share": shares[kind], "ratio": statistics.median(costs[name][kind])} for kind in shares}
        middle = statistics.median(whole)
        result["methods"][name] = {
            "ratio": middle,
            "quartiles": _quartiles(whole),
            "ms": 1e3 * scale * middle,
            "worst": max(about["ratio"] for about in kinds.values()) * stepper.models,
            "kinds": kinds,
        }
    result["methods"] |= {name: {"reason": reason} for name, reason in reasons.items()}
    return result


def _try(make: Callable[[Case], Stepper], case: Case) -> Stepper | str:
    """Returns a stepper, or the reason why there is none."""
    try:
        return make(case)
    except Unsupported as error:
        return str(error)


def seconds_of_each_kind(stepper: Stepper) -> dict[str, float]:
    """Measures seconds of a ``plain`` step, and of what ``statistics`` and a whole new ``basis`` cost on top of one."""
    times = {kind: _time(stepper, 3 if kind == "plain" else 1, place) for kind, (place, _) in stepper.kinds().items()}
    plain, with_statistics = times["plain"], times["statistics"]
    seconds_by_kind = {"plain": plain, "statistics": with_statistics - plain, "basis": 0.0}
    for kind, seconds in times.items():
        if "basis" in kind:
            seconds_by_kind["basis"] += seconds - (with_statistics if "statistics" in kind else plain)
    return seconds_by_kind


def warm_up(stepper: Stepper) -> None:
    """Makes one step of each kind, after the very first."""
    stepper.step()
    for place, _ in stepper.kinds().values():
        stepper.seek(place)
        stepper.step()


def _time(stepper: Stepper, count: int, place: int) -> float:
    """Measures seconds of CPU time of a step at ``place`` of the cycle, mean over ``count``."""
    total = 0.0
    for _ in range(count):
        stepper.seek(place)
        start = time.process_time()
        stepper.step()
        total += time.process_time() - start
    return total / count


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


_PRINT_PEAK = "import sys; from eigenoise.studies.bench.measure import print_peak_memory as f; f(*sys.argv[1:])"


def peak_memory(case: str, method: str) -> float | None:
    """Measures peak resident megabytes of a new process that makes a step of each kind; None on Windows."""
    if sys.platform == "win32":
        return None
    command = [sys.executable, "-c", _PRINT_PEAK, case, method]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"measuring the memory of {method!r} on case {case!r} failed:\n{result.stderr[-2000:]}")
    return float(result.stdout.strip().splitlines()[-1])


def print_peak_memory(case: str, method: str) -> None:
    """Makes the steps and prints the peak; runs in the new process."""
    torch.set_num_threads(1)
    problem = CASES[case]()
    makers = {"SGD": sgd, **OURS, **MORE.get(case, {})}
    stepper = makers[method](problem) if method in makers else Stepper(installed()[method](problem))
    for _ in range(2):
        for place, _share in stepper.kinds().values():
            stepper.seek(place)
            stepper.step()
    print(_peak_megabytes())


def _peak_megabytes() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent process too, from before this one's own program began
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)

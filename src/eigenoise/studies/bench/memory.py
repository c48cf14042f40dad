"""Peak memory of training, each method in a new process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from eigenoise.studies.bench.cases import CASES
from eigenoise.studies.bench.peers import installed
from eigenoise.studies.bench.steps import MORE, OURS, Stepper, sgd

_RUN = "import sys; from eigenoise.studies.bench.memory import run; run(*sys.argv[1:])"


def peak(case: str, method: str) -> float | None:
    """Measures peak resident megabytes of a new process that makes a step of each kind; None on Windows."""
    if sys.platform == "win32":
        return None
    command = [sys.executable, "-c", _RUN, case, method]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"measuring the memory of {method!r} on case {case!r} failed:\n{result.stderr[-2000:]}")
    return float(result.stdout.strip().splitlines()[-1])


def run(case: str, method: str) -> None:
    """Makes the steps and prints the peak; runs in the new process."""
    import torch

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

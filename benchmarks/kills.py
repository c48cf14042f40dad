"""Kill a training run with SIGKILL at random moments, again and again, and compare its end with one left in peace.

    python benchmarks/kills.py [--kills 200] [--show]

Every process goes on from the last good checkpoint, saves after each pass, and is killed at a moment drawn from as long
as five passes take. The counts are written to benchmarks/results/kills.json: kills, those that left a checkpoint
half written, the passes that were repeated, and whether the result was the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch

from eigenoise import storage
from eigenoise.reporting.progress import watching
from eigenoise.studies.checkpoints import read
from eigenoise.studies.recipes import PRESETS
from eigenoise.studies.regression.study import Run, run_uci
from eigenoise.studies.runner import environment

OUT = Path(__file__).parent / "results" / "kills.json"
METHODS = ("noisy-ekfac", "noisy-kfac", "noisy-adam", "bbb")


def passes(run: Run, out: Path) -> int:
    """That are done, by the newest file; a damaged one would be an error."""
    names = (f".{run.name}.checkpoint", f".{run.name}.checkpoint.before")
    newest = next((out / name for name in names if (out / name).exists()), None)
    return 0 if newest is None else len(read(newest)["state"]["curve"])


def killed_after(run: Run, out: Path, seconds: float) -> tuple[bool, int]:
    """Whether a process was killed at work rather than done, and the passes it did after what it went on from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            run_uci(run, out, on_epoch=lambda training: os.write(writing, b"."))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb", buffering=0) as pipe:
        pipe.read(1)  # it has begun
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        done = 1 + len(pipe.read())
    if status not in (0, signal.SIGKILL):
        raise RuntimeError(f"a process that went on from a checkpoint failed: {status}")
    return status != 0, done


def trial(method: str, kills: int, seed: int) -> dict:
    """One run that is killed ``kills`` times."""
    chance = random.Random(seed)
    torch.set_num_threads(1)
    Run.SAVE_SECONDS = 0.0
    run = Run("boston", method, PRESETS["paper"], splits=2, epochs=6 * kills)
    with tempfile.TemporaryDirectory() as folder, watching(True) as watch:
        straight, broken = (Path(folder) / name for name in ("straight", "broken"))
        straight.mkdir()
        broken.mkdir()
        task = watch.task(f"{method}, in peace", run.epochs)
        began = time.monotonic()
        wanted = run_uci(run, straight, on_epoch=lambda training: task.to(len(training.curve)))
        one = (time.monotonic() - began) / (6 * kills)
        task.end()
        task = watch.task(f"{method}, killed", kills)
        count = halves = vain = 0
        while count < kills:
            before = passes(run, broken)
            killed, done = killed_after(run, broken, chance.uniform(0, 5 * one))
            if not killed:
                break
            count += 1
            halves += any(broken.glob(f"..{run.name}.checkpoint.????????"))
            after = passes(run, broken)
            if after < before:
                raise RuntimeError(f"a kill lost passes that were saved: {before} before, {after} after it")
            vain += before + done - after
            task.to(count)
        found = run_uci(run, broken)
        task.end()
    times = [result.pop("seconds") for result in (wanted, found)]
    return {
        "kills": count,
        "left_half_a_file": halves,
        "passes": run.epochs,
        "passes_in_vain": vain,
        "same_bytes": json.dumps(wanted) == json.dumps(found),
        "seconds": times,
    }


def show(results: dict) -> None:
    print(f"{'method':12} {'kills':>6} {'half a file':>12} {'passes':>7} {'repeated':>8}  same result, bit for bit")
    for method, found in results["methods"].items():
        end = "yes" if found["same_bytes"] else "NO"
        print(
            f"{method:12} {found['kills']:6} {found['left_half_a_file']:12} {found['passes']:7} "
            f"{found['passes_in_vain']:8}  {end}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    if not args.show:
        each = -(-args.kills // len(METHODS))
        found = {method: trial(method, each, seed) for seed, method in enumerate(METHODS)}
        storage.write_json(OUT, {"methods": found, "environment": environment()})
    show(json.loads(OUT.read_text()))


if __name__ == "__main__":
    main()

"""Work off a list of long studies on one core at low priority, to be stopped and started at any time.

    python benchmarks/study_queue.py            # go on where it was; Ctrl+C or SIGTERM stops within a step
    python benchmarks/study_queue.py --show     # what is done, running and left, with the hours that it needs

The list is benchmarks/study_queue.json: names, the arguments of ``eigenoise`` with OUT for a folder of the study's own,
the hours expected, and the folder below benchmarks/results that results are copied to as they come. Each study resumes
from its own checkpoints; those, logs and the record of what was spent are in the folder of --state, outside the
repository. A study that fails is named with the end of its log, and the next one is begun; it is tried again by the
next start.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eigenoise import storage
from eigenoise.reporting.tables import Grid

HERE = Path(__file__).parent
LIST, RESULTS = HERE / "study_queue.json", HERE / "results"
STATE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "eigenoise" / "queue"
COMMAND = [sys.executable, "-m", "eigenoise"]
LOOK_SECONDS, PATIENCE, LOG_END = 5.0, 120.0, 300  # between looks, for a study to save, characters


@dataclass(frozen=True)
class Study:
    """One entry of the list."""

    name: str
    arguments: list[str]
    hours: float
    results: str

    @classmethod
    def of(cls, entry: Any) -> Study:
        """From an entry of the file.

        Raises:
            ValueError: if it is not one.
        """
        try:
            name, hours = str(entry["name"]), float(entry["hours"])
            arguments, results = [str(word) for word in entry["arguments"]], str(entry["results"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected name, arguments, hours and results, got {str(entry)[:80]} ({error})") from error
        if not name.replace("-", "").isalnum() or "OUT" not in arguments or ".." in Path(results).parts:
            raise ValueError(f"expected a plain name and OUT among the arguments, got {str(entry)[:80]}")
        return cls(name, arguments, hours, results)


def studies(path: Path) -> list[Study]:
    """The list; entries that cannot be read are named and left out.

    Raises:
        ValueError: if the file is no list at all.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of studies, got {type(entries).__name__}")
    found = [_read(entry, f"entry {number} of {path.name}") for number, entry in enumerate(entries, 1)]
    return [study for study in found if study is not None]


def _read(entry: Any, where: str) -> Study | None:
    try:
        return Study.of(entry)
    except ValueError as error:
        print(f"{where} is passed over: {error}", flush=True)
        return None


@dataclass
class Record:
    """What was spent on each study and how it ended, in one file of the state's folder."""

    path: Path
    studies: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The record, a new one if there is none; a damaged one is put aside."""
        record = cls(folder / "record.json")
        if record.path.exists():
            try:
                content = json.loads(record.path.read_text())
                record.studies = {
                    name: {"seconds": float(entry["seconds"]), "end": str(entry["end"])}
                    for name, entry in content.items()
                }
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                aside = record.path.with_suffix(".damaged")
                record.path.replace(aside)
                print(f"{record.path} cannot be read ({error}): moved to {aside.name}, times begin at 0", flush=True)
        return record

    def note(self, name: str, seconds: float, end: str) -> None:
        """Add time and set how the study stands."""
        before = self.studies.get(name, {"seconds": 0.0})["seconds"]
        self.studies[name] = {"seconds": round(before + seconds, 1), "end": end}
        storage.write_json(self.path, self.studies)

    def end(self, name: str) -> str:
        """How a study stands: done, failed, stopped, running or waiting."""
        return self.studies.get(name, {"end": "waiting"})["end"]


def table(todo: list[Study], record: Record) -> Grid:
    """What is done, running and left."""
    rows = []
    for study in todo:
        spent = record.studies.get(study.name, {"seconds": 0.0})["seconds"] / 3600
        left = 0.0 if record.end(study.name) == "done" else max(study.hours - spent, 0.1)
        rows.append([study.name, record.end(study.name), f"{spent:.1f}", f"{left:.1f}"])
    rows.append(["together", "", *(f"{sum(float(row[i]) for row in rows):.1f}" for i in (2, 3))])
    return Grid("Long studies, hours on one core", ["study", "state", "spent", "left"], rows)


class Stop(Exception):  # noqa: N818
    """The queue was asked to stop."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within the block no other queue works in ``folder``.

    Raises:
        ValueError: if one does.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another queue works in {folder}: stop it first") from None
        yield


def attempt(study: Study, folder: Path, record: Record) -> str:
    """``work``, where a folder or file that cannot be written is a failure of this study alone."""
    try:
        return work(study, folder, record)
    except OSError as error:
        record.note(study.name, 0.0, "failed")
        return f"failed: {error}"


def work(study: Study, folder: Path, record: Record) -> str:
    """Run one study until it is done, fails or the queue is stopped; how it ended."""
    out, log = folder / study.name, folder / f"{study.name}.log"
    storage.folder(out)
    words = [str(out) if word == "OUT" else word for word in study.arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("a") as sink:
        child = subprocess.Popen(
            [*COMMAND, *words],
            stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            preexec_fn=_modest,
        )  # fmt: skip
    since = time.monotonic()
    try:
        while child.poll() is None:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            record.note(study.name, now - since, "running")
            since = now
            copy(out, study.results)
    except (Stop, KeyboardInterrupt):
        child.terminate()  # studies finish their step, save and end
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
        child.kill()
        record.note(study.name, time.monotonic() - since, "stopped")
        raise
    copy(out, study.results)
    record.note(study.name, time.monotonic() - since, "failed" if child.returncode else "done")
    if child.returncode:
        print(f"{study.name} failed ({child.returncode}): …{log.read_text()[-LOG_END:].strip()}", flush=True)
    return record.end(study.name)


def _modest() -> None:
    """One core, the last to be served."""
    os.nice(19)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def copy(out: Path, results: str) -> None:
    """Put results that are new or changed into the repository; checkpoints are hidden files and stay."""
    for path in out.glob("*.json"):
        target = RESULTS / results / path.name
        if not path.name.startswith(".") and (not target.exists() or target.read_bytes() != path.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target.with_name(f".{path.name}.new"))
            target.with_name(f".{path.name}.new").replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    try:
        todo = studies(args.list)
        storage.folder(args.state)
        record = Record.read(args.state)
        if args.show:
            print(table(todo, record).markdown(), end="")
            return 0
        signal.signal(signal.SIGTERM, _stop)
        with alone(args.state):
            for study in todo:
                if record.end(study.name) != "done":
                    print(f"{study.name}: begun or resumed", flush=True)
                    print(f"{study.name}: {attempt(study, args.state, record)}", flush=True)
    except (Stop, KeyboardInterrupt):
        print("stopped; the same command goes on", flush=True)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(todo, record).markdown(), end="")
    return 0


def _stop(number: int, frame: Any) -> None:
    raise Stop


if __name__ == "__main__":
    sys.exit(main())

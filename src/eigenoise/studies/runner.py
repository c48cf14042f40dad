"""One resumable run of a study: find its result, or resume from a checkpoint, train, test, and write the result."""

from __future__ import annotations

import json
import math
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch

from eigenoise import checks, storage
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies.checkpoints import SAVE_SECONDS, SAVE_STEPS, Checkpoints, digest, leaves
from eigenoise.version import __version__


class Training(Protocol):
    """What a study trains; ``curve`` has one entry for each step that is done."""

    curve: list[Any]

    def steps(self) -> Iterator[int]:
        """Trains on from the current state and yields the number of steps so far after each."""

    def scores(self, on_pass: Callable[[], None]) -> dict[str, Any]:
        """Tests, calling ``on_pass`` after each pass over the test data, and returns entries of the result."""

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a bit-exact resume needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""


class Run(ABC):
    """A run of a study: its settings, and its files in a folder.

    Attributes:
        FORMAT: number of the result's format.
        SAVE_SECONDS: time between checkpoints.
        SAVE_STEPS: steps between checkpoints.
    """

    FORMAT: ClassVar[int]
    SAVE_SECONDS: ClassVar[float] = SAVE_SECONDS
    SAVE_STEPS: ClassVar[int] = SAVE_STEPS

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the result's file, without suffix."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns everything that decides the result, as JSON values; a result of other settings is another run's."""

    def path(self, out: Path) -> Path:
        """Returns the file of the result in the folder ``out``."""
        return out / f"{self.name}.json"

    def result(self, out: Path) -> dict[str, Any] | None:
        """Returns the result if it is in ``out``; raises as ``read_result`` does."""
        return read_result(self.path(out), self.settings(), self.FORMAT)

    def checkpoints(
        self, out: Path, conditions: Mapping[str, Any] = MappingProxyType({}), ranks: Ranks | None = None
    ) -> Checkpoints:
        """Returns the checkpoints of the run in ``out``; for the arguments see ``execute``."""
        settings, path = {**self.settings(), **conditions}, out / f".{self.name}.checkpoint"
        return Checkpoints(path, settings, seconds=self.SAVE_SECONDS, steps=self.SAVE_STEPS, ranks=ranks)

    def execute(
        self,
        training: Training,
        out: Path,
        *,
        conditions: Mapping[str, Any],
        ranks: Ranks | None = None,
        on_step: Callable[[], None] = lambda: None,
        on_pass: Callable[[], None] = lambda: None,
    ) -> dict[str, Any] | None:
        """Trains from the last checkpoint on, tests, and writes the result.

        Args:
            training: what to train, in its initial state.
            out: folder of results and checkpoints.
            conditions: entries of the result beside its settings that a checkpoint must agree with as well.
            ranks: the processes that train together; ``out`` must be one folder for all, and rank 0 tests and writes.
            on_step: called after each step.
            on_pass: called after each pass over the test data.

        Returns:
            The result, or None in a process other than rank 0.

        Raises:
            ValueError: if there is a checkpoint that cannot be used.
            NotFiniteError: if training diverges or a score is not finite.
        """
        checkpoints = self.checkpoints(out, conditions, ranks)
        checkpoints.resume(training.load_state_dict)
        if ranks is not None:
            begun = torch.tensor([float(len(training.curve))], device=ranks.device)
            ranks.refuse_different([begun], f"{out} differs between processes: it must be one folder for all")
        for _ in checkpoints.saving(training.steps(), training.state_dict):
            on_step()
        if not checkpoints.writes and ranks is not None:
            while ranks.any(False):  # rank 0 tests, and reports after every pass so that nobody waits too long
                pass
            return None

        def report_pass() -> None:
            on_pass()
            if ranks is not None:
                ranks.any(True)

        scores = training.scores(report_pass)
        for name, entry in scores.items():
            if not all(math.isfinite(leaf) for _, leaf in leaves(name, entry) if isinstance(leaf, float)):
                raise checks.NotFiniteError(f"{name} is not finite after training; try a smaller lr")
        result = {
            "format": self.FORMAT,
            "settings": self.settings(),
            **conditions,
            **scores,
            "curve": training.curve,
            "seconds": checkpoints.seconds_spent,
            "digest": digest(training.state_dict()),
            "environment": environment(),
        }
        storage.write_json(self.path(out), result)
        checkpoints.remove()
        if ranks is not None:
            ranks.any(False)
        return json.loads(json.dumps(result))


def read_result(path: Path, settings: Mapping[str, Any], format: int) -> dict[str, Any] | None:
    """Returns the result in a file, or None if there is no file.

    Args:
        path: the result's file.
        settings: settings that it must have.
        format: number of the format that this version reads.

    Raises:
        ValueError: if the file cannot be read or is the result of other settings; it is left unchanged.
    """
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text())
        if result["format"] != format:
            raise ValueError(f"expected format {format}, got {result['format']}")
        present = result["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result that this version can read ({error}); move it away") from error
    if present != settings:
        raise ValueError(f"{path} is the result of other settings; choose another folder or move it away")
    return result


def collect(paths: Iterable[Path], format: int, check: Callable[[Mapping[str, Any]], None]) -> list[dict[str, Any]]:
    """Reads all results of a study in a folder; files of other things are passed over.

    Args:
        paths: JSON files.
        format: number of the format that this version reads.
        check: raises for a result that lacks something.

    Raises:
        ValueError: if a result is damaged, with the name of its file.
    """
    results = [_checked(path, format, check) for path in paths]
    return [result for result in results if result is not None]


def _checked(path: Path, format: int, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
        if not (isinstance(content, dict) and content.get("format") == format and "settings" in content):
            return None
        check(content)
        return content
    except KeyError as error:
        raise ValueError(f"{path} looks like a result but lacks {error}; move it away") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} looks like a result but is not ({error}); move it away") from error


def check_numbers(name: str, values: Any) -> None:
    """Raise TypeError unless ``values`` are a list of one number or more."""
    if not isinstance(values, list) or not values or not all(isinstance(value, (int, float)) for value in values):
        raise TypeError(f"{name}: expected a list of numbers, got {str(values)[:40]}")


def environment() -> dict[str, Any]:
    """Describes the software and machine that a result comes from."""
    return {
        "eigenoise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }

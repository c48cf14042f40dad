"""Files that were damaged on purpose, for every reader of files: what each may do with them, and how to see it.

A case is a whole file with bits flipped, pieces cut out, doubled or overwritten, its length changed, or random bytes
alone. A reader may understand it, or raise one of the errors it is said to; nothing else may happen: no other
exception, no code run, no file written outside its own folder, no memory beyond a bound.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import sys
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import eigenoise as en
from eigenoise.inference.posterior import Posterior
from eigenoise.studies.checkpoints import MAGIC, Checkpoints
from eigenoise.studies.data import images
from eigenoise.studies.runner import read_result
from eigenoise.tabular import BayesianMLPRegressor, persistence
from eigenoise.tabular.reading import read_table

MOST_MEMORY = 400  # MB more than before a whole run of cases


@dataclass(frozen=True)
class Reader:
    """A way to read a file.

    Attributes:
        name: of the file.
        make: writes a good one.
        read: reads it.
        sealed: whether a checksum keeps damaged content from being read at all; it is made anew for some cases.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    sealed: Callable[[bytes], bytes] | None = None


def _posterior(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    opt = en.NoisyEKFAC(model, num_data=10, likelihood=en.GaussianLikelihood())
    opt.posterior.save(path)


def _model(path: Path) -> None:
    made = np.random.default_rng(0)
    x = made.normal(size=(20, 2))
    short = {"max_epochs": 1, "early_stopping": False, "kl_weight": 1.0, "prior_var": 1.0, "members": 1}
    persistence.save(BayesianMLPRegressor((3,), random_state=0, **short).fit(x, x[:, 0]), path)


def _checkpoint(path: Path) -> None:
    Checkpoints(path, {"a": 1}).save({"weights": torch.arange(20.0), "curve": [[0.5, 0.1]], "step": 3})


def _resume(path: Path) -> None:
    Checkpoints(path, {"a": 1}).resume(lambda state: None)


def _sealed_checkpoint(content: bytes) -> bytes:
    payload = content[len(MAGIC) + 65 :]
    return MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def _csv(path: Path) -> None:
    rows = [f'{i},{i / 7:.3f},"name {i % 3}",2020-01-{i + 1:02}' for i in range(20)]
    path.write_text("\n".join(["a,b,c,d", *rows]) + "\n")


def _parquet(path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"a": range(30), "b": [f"t{i}" for i in range(30)], "c": np.linspace(0, 1, 30)}).to_parquet(path)


def _archive(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name in images.CIFAR10_FILES:
            content = bytes(images.RECORD)
            about = tarfile.TarInfo(f"{images.CIFAR10_FOLDER}/{name}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def _unpack(path: Path) -> None:
    images._unpack(path, path.parent / "home")


def _fashion(path: Path) -> None:
    import gzip

    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([2051, 3, 28, 28], ">i4").tobytes()
    path.write_bytes(gzip.compress(header + bytes(range(256)) * 9 + bytes(784 * 3 - 256 * 9)))


def _svhn(path: Path) -> None:
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": np.arange(32 * 32 * 3 * 2, dtype=np.uint8).reshape(32, 32, 3, 2)})


def _other(name: str) -> Callable[[Path], object]:
    return lambda path: images.other(name, path.parent.parent)


def _result(path: Path) -> None:
    path.write_text(json.dumps({"format": 1, "settings": {"a": 1}, "scores": {}}))


READERS = {
    "posterior": Reader("q.safetensors", _posterior, Posterior.load),
    "model": Reader("m.safetensors", _model, persistence.load),
    "checkpoint": Reader("run.checkpoint", _checkpoint, _resume, _sealed_checkpoint),
    "CSV": Reader("t.csv", _csv, read_table),
    "Parquet": Reader("t.parquet", _parquet, read_table),
    "CIFAR-10's archive": Reader("cifar.tar.gz", _archive, _unpack),
    "Fashion-MNIST": Reader(str(images.OTHERS["fashion-mnist"]), _fashion, _other("fashion-mnist")),
    "SVHN": Reader(str(images.OTHERS["svhn"]), _svhn, _other("svhn")),
    "result": Reader("r.json", _result, lambda path: read_result(path, {"a": 1}, 1)),
}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """``content`` after one to four accidents."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(2000))
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found) + 1)
        size = min(len(found) - place, int(chance.expovariate(1 / 30)) + 1)
        kind = chance.randrange(6)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            found[place : place + size] = chance.randbytes(size)
        elif kind == 2:
            del found[place : place + size]
        elif kind == 3:
            found[place:place] = found[place : place + size]
        elif kind == 4:
            del found[place:]
        else:
            found[place : place + size] = chance.choice([b"\0", b"\xff", b"9", b"{", b'"', b","]) * size
    return bytes(found)


def fuzz(name: str, cases: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of what a reader did with ``cases`` damaged files: understood, refused.

    Raises:
        AssertionError: if it did anything else, with the case's number; the file is then still there.
    """
    reader, chance = READERS[name], random.Random(f"{name} {seed}")
    home = folder / "home of it"
    path = home / reader.name
    path.parent.mkdir(parents=True, exist_ok=True)
    reader.make(path)
    good = path.read_bytes()
    outside = {each.name for each in folder.iterdir()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = {"understood": 0, "refused": 0}
    for case in range(cases):
        content = damaged(good, chance)
        if reader.sealed is not None and chance.random() < 0.7 and len(content) > len(good) // 2:
            content = reader.sealed(content)
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(path)
            counts["understood"] += 1
        except (ValueError, OSError) as error:
            if not str(error).strip():
                raise AssertionError(f"{name}, case {case}: an error without a word") from error
            counts["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{name}, case {case}: {type(error).__name__}: {error}") from error
        assert {each.name for each in folder.iterdir()} == outside, f"{name}, case {case}: wrote outside its folder"
    unit = 1 if sys.platform != "darwin" else 1024
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 / unit
    assert grown < MOST_MEMORY, f"{name}: {grown:.0f} MB more"
    return counts

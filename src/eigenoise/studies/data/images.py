"""Sets of small colour images as tensors: CIFAR-10, and out-of-distribution sets."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eigenoise import checks, storage
from eigenoise.studies.data.files import DataFileError, cache_folder, check, fetch

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_HASH = "md5:c32a1d4ab5d03f1284b67883e8d87530"  # the one that its authors publish
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # a label and an image
RECORDS = 10_000  # in each file
OTHERS = {  # sets without a class in common with CIFAR-10, and the file of their test part
    "fashion-mnist": Path("fashion-mnist") / "t10k-images-idx3-ubyte.gz",
    "svhn": Path("svhn") / "test_32x32.mat",
}


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        x: ``(N, 3, 32, 32)``, whole numbers from 0 to 255.
        y: ``(N,)``, classes from 0.
        classes: how many there are.
    """

    x: Tensor
    y: Tensor
    classes: int = 10

    def __post_init__(self) -> None:
        if self.x.dtype is not torch.uint8 or self.x.ndim != 4 or tuple(self.x.shape[1:]) != SHAPE:
            raise ValueError(f"x: expected uint8 of the shape (N, 3, 32, 32), got {self.x.dtype} {tuple(self.x.shape)}")
        checks.shape("y", self.y, (len(self.x),))
        if len(self.y) and not 0 <= int(self.y.min()) <= int(self.y.max()) < self.classes:
            raise ValueError(
                f"y: expected classes from 0 to {self.classes - 1}, got {int(self.y.min())} to {int(self.y.max())}"
            )

    def __len__(self) -> int:
        return len(self.y)

    def some(self, rows: Tensor | slice) -> Images:
        """Returns the images at ``rows``."""
        return Images(self.x[rows], self.y[rows], self.classes)

    def to(self, device: torch.device | str) -> Images:
        """Moves the images to a device."""
        return Images(self.x.to(device), self.y.to(device), self.classes)


def is_here(name: str, folder: str | os.PathLike | None = None) -> bool:
    """Tells whether a set, ``"cifar10"`` or one of ``OTHERS``, is in the cache."""
    cache = cache_folder(folder)
    if name == "cifar10":
        return all((_home(cache) / file).is_file() for file in CIFAR10_FILES)
    return (cache / OTHERS[name]).is_file()


def _home(cache: Path) -> Path:
    """The folder of the six files: one in the cache, or the cache itself."""
    return cache if (cache / "test_batch.bin").is_file() else cache / CIFAR10_FOLDER


def cifar10(folder: str | os.PathLike | None = None) -> tuple[Images, Images]:
    """Loads the 50,000 training and 10,000 test images from the six files of the official binary archive.

    The files are in ``cifar-10-batches-bin`` of the cache. If one is missing, they are unpacked from the archive, which
    is downloaded if necessary; nothing else of the archive is written.

    Args:
        folder: the cache, by default as ``cache_folder`` says; or the folder with the six files itself.

    Raises:
        DataFileError: if files are missing and cannot be downloaded, or are damaged.
    """
    cache = cache_folder(folder)
    home = _home(cache)
    if not all((home / name).is_file() for name in CIFAR10_FILES):
        _unpack(fetch(CIFAR10_URL, cache / "cifar-10-binary.tar.gz", CIFAR10_HASH), home)
    parts = []
    for name, known in CIFAR10_FILES.items():
        check(home / name, known)
        parts.append(np.fromfile(home / name, np.uint8).reshape(RECORDS, RECORD))
    return _images(parts[:-1]), _images(parts[-1:])


def other(name: str, folder: str | os.PathLike | None = None) -> Tensor:
    """Loads the test images of another set as ``(N, 3, 32, 32)`` uint8, to test out-of-distribution detection.

    Fashion-MNIST's are grey and 28 pixels wide: they get a black border and three equal colours.

    Raises:
        ValueError: for a name that is not in ``OTHERS``.
        DataFileError: if the file is not in the cache or cannot be read.
    """
    path = cache_folder(folder) / OTHERS[checks.choice("name", name, OTHERS)]
    if not path.is_file():
        raise DataFileError(f"{name} is not in the cache: put its test part at {path}")
    try:
        return _fashion(path) if name == "fashion-mnist" else _svhn(path)
    except ImportError:
        raise
    except Exception as error:  # whatever a reader of foreign formats may raise
        raise DataFileError(f"{path} cannot be read: {error}; delete it and fetch it again") from error


def _unpack(archive: Path, home: Path) -> None:
    """Writes the six files and nothing else, whatever the archive holds and wherever it would put it."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "r:gz") as tar:
            for name in CIFAR10_FILES:
                member = tar.getmember(f"{CIFAR10_FOLDER}/{name}")
                content = tar.extractfile(member) if member.isreg() and member.size == RECORD * RECORDS else None
                if content is None:
                    raise DataFileError(f"{archive} holds something else than an image file under {member.name}")
                storage.write_bytes(home / name, content.read())
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise DataFileError(f"{archive} cannot be unpacked: {error}; delete it to fetch it again") from error


def _images(parts: Sequence[np.ndarray]) -> Images:
    raw = torch.from_numpy(np.concatenate(parts))
    return Images(raw[:, 1:].reshape(-1, *SHAPE), raw[:, 0].long())


def _fashion(path: Path) -> Tensor:
    with gzip.open(path) as file:
        magic, count, *size = np.frombuffer(file.read(16), ">i4").tolist()
        raw = np.frombuffer(file.read(784 * 70_000), np.uint8)  # there are no more
    if (magic, *size) != (2051, 28, 28) or len(raw) != 784 * count or not count:
        raise ValueError("it is no whole file of 28×28 images")
    grey = torch.from_numpy(raw.copy()).reshape(-1, 1, 28, 28)
    return torch.nn.functional.pad(grey, (2, 2, 2, 2)).repeat(1, 3, 1, 1)


def _svhn(path: Path) -> Tensor:
    from scipy.io import loadmat  # comes with scikit-learn

    x = torch.from_numpy(np.ascontiguousarray(loadmat(path, variable_names=["X"])["X"]))  # (32, 32, 3, N)
    if x.dtype is not torch.uint8 or tuple(x.shape[:3]) != (32, 32, 3):
        raise ValueError(f"it holds {x.dtype} of the shape {tuple(x.shape)}, not images")
    return x.permute(3, 2, 0, 1).contiguous()

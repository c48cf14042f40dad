"""What methods are compared on: data, a network, a batch size and a time, and whether the task chose our defaults."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from eigenoise import checks, models
from eigenoise.studies.data import DataFileError, images, uci
from eigenoise.studies.data.files import cache_folder

CHOOSING, REPORTING = "choosing", "reporting"
FASHION = ("/usr/share/datasets/fashion-mnist", "fashion-mnist")  # Debian's package, or in the cache
MAX_TEST, MAX_TEST_CONVOLUTIONS, MAX_OTHER, VALIDATION = 5000, 2000, 1000, 0.1


@dataclass(frozen=True)
class Parts:
    """Rows of a task.

    Attributes:
        x: training inputs ``(N, ...)``.
        y: training targets, classes ``(N,)`` or standardised numbers ``(N, 1)``.
        x_validation: for those who tune; not trained on by anyone.
        y_validation: likewise.
        x_test: looked at once, by the final model.
        y_test: likewise.
        x_other: inputs from elsewhere, to be told from the test's, or None.
    """

    x: Tensor
    y: Tensor
    x_validation: Tensor
    y_validation: Tensor
    x_test: Tensor
    y_test: Tensor
    x_other: Tensor | None = None


@dataclass(frozen=True)
class Task:
    """A problem.

    Attributes:
        title: a few words.
        role: ``"choosing"`` if our defaults were found on it, with its validation rows, or ``"reporting"``.
        load: builds the rows of a seed.
        network: builds a network.
        seconds: the short budget, in CPU seconds; the others are multiples.
        classes: whether targets are classes.
        batch_size: of everybody.
    """

    title: str
    role: str
    load: Callable[[int], Parts]
    network: Callable[[], nn.Module]
    seconds: float
    classes: bool = True
    batch_size: int = 128


def _parts(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, seed: int, x_other: Tensor | None = None) -> Parts:
    """Holds out a tenth of the training rows, drawn by ``seed``, and takes the first test rows."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: round(VALIDATION * len(x))], order[round(VALIDATION * len(x)) :]
    other = None if x_other is None else x_other[:MAX_OTHER]
    return Parts(x[kept], y[kept], x[held], y[held], x_test[:MAX_TEST], y_test[:MAX_TEST], other)


def _idx(name: str) -> Tensor:
    folders = [Path(FASHION[0]), cache_folder() / FASHION[1]]
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise DataFileError(
            f"{name} is in none of {', '.join(map(str, folders))}: apt-get install dataset-fashion-mnist"
        )
    with gzip.open(path) as file:
        raw = file.read()
    offset = 4 + 4 * raw[3]  # a header of as many numbers as there are axes
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=offset).copy())


def _fashion(rows: int | None = None) -> Callable[[int], Parts]:
    def load(seed: int) -> Parts:
        x, x_test = (_scaled_grey(_idx(f"{part}-images-idx3-ubyte.gz").view(-1, 784)) for part in ("train", "t10k"))
        y, y_test = (_idx(f"{part}-labels-idx1-ubyte.gz").long() for part in ("train", "t10k"))
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + seed))[:rows]
        return _parts(x[some], y[some], x_test, y_test, seed, _digits_as_fashion())

    return load


def _scaled_grey(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.2860) / 0.3530


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data).float() / 16, torch.tensor(found.target)


def _digits_as_fashion() -> Tensor:
    x = functional.interpolate(_digits()[0].view(-1, 1, 8, 8), size=28, mode="bilinear")
    return _scaled_grey(255 * x).flatten(1)


def _small_digits(seed: int) -> Parts:
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2000 + seed))
    train, test = order[:1400], order[1400:]
    return _parts(
        x[train], y[train], x[test], y[test], seed, torch.rand(400, 64, generator=torch.Generator().manual_seed(0))
    )


def _cifar(rows: int) -> Callable[[int], Parts]:
    def load(seed: int) -> Parts:
        train, test = images.cifar10()
        some = torch.randperm(len(train), generator=torch.Generator().manual_seed(3000 + seed))[:rows]
        scaled = [_scaled_colours(x) for x in (train.x[some], test.x)]
        other = _scaled_colours(images.other("fashion-mnist")) if images.is_here("fashion-mnist") else None
        few = slice(MAX_TEST_CONVOLUTIONS)
        return _parts(scaled[0], train.y[some], scaled[1][few], test.y[few], seed, other)

    return load


def _scaled_colours(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.47) / 0.25


def _table(name: str) -> Callable[[int], Parts]:
    def load(seed: int) -> Parts:
        year = name == "year"  # which has one official split
        splits = uci.year_splits()[0] if year else uci.canonical_splits(uci.load(name), [seed % uci.info(name).splits])
        return _parts(splits.x_train[0], splits.y_train[0], splits.x_test[0], splits.y_test[0], seed)

    return load


def _packaged(name: str, classes: bool) -> Callable[[int], Parts]:
    """One of scikit-learn's own tables, four fifths of it for training."""

    def load(seed: int) -> Parts:
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")()
        x, y = torch.tensor(found.data).float(), torch.tensor(found.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5000 + seed))
        train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
        y = y.long() if classes else ((y - y[train].mean()) / y[train].std()).float().unsqueeze(-1)
        x = (x - x[train].mean(0)) / x[train].std(0)
        return _parts(x[train], y[train], x[test], y[test], seed)

    return load


VOCABULARY, LENGTH = 16, 16


def _sequences(seed: int) -> Parts:
    """Sequences of tokens; the class is that of the token after the only 0, and one label in ten is random."""
    chance = torch.Generator().manual_seed(4000 + seed)
    rows = 8000
    x = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=chance)
    place = torch.randint(LENGTH - 1, (rows,), generator=chance)
    x[torch.arange(rows), place] = 0
    y = x[torch.arange(rows), place + 1] % 4
    random = torch.rand(rows, generator=chance) < 0.1
    y = torch.where(random, torch.randint(4, (rows,), generator=chance), y)
    other = torch.randint(1, VOCABULARY, (1000, LENGTH), generator=chance)  # without any 0
    return _parts(x[:5000], y[:5000], x[5000:], y[5000:], seed, other)


def _counts(seed: int) -> Parts:
    """Sequences of tokens; the class is the most frequent of the tokens 0 to 3, three times to the others' two."""
    chance = torch.Generator().manual_seed(6000 + seed)
    rows = 5000
    y = torch.randint(4, (rows,), generator=chance)
    marks = torch.cat([torch.arange(4).expand(rows, 4).repeat(1, 2), y[:, None]], 1)
    x = torch.cat([marks, torch.randint(4, VOCABULARY, (rows, LENGTH - marks.shape[1]), generator=chance)], 1)
    x = x.gather(1, torch.rand(rows, LENGTH, generator=chance).argsort(1))
    other = torch.randint(4, VOCABULARY, (1000, LENGTH), generator=chance)  # without marks
    return _parts(x[:2000], y[:2000], x[2000:], y[2000:], seed, other)


class RecurrentClassifier(nn.Module):
    """Map tokens ``(b, t)`` to logits ``(b, 4)`` by embeddings and an LSTM's last state."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.words, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, 2 * width, batch_first=True)
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        return self.head(self.lstm(self.words(x))[0][:, -1])


class SequenceClassifier(nn.Sequential):
    """Map tokens ``(b, t)`` to logits ``(b, 4)`` by embeddings and a small transformer encoder."""

    def __init__(self, width: int = 32):
        super().__init__(_Embedding(width), models.TransformerEncoder(width=width, depth=2, heads=2, classes=4))


class _Embedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) + self.places(torch.arange(LENGTH, device=x.device))


def convnet(batch_norm: bool, channels: int = 3, side: int = 32) -> nn.Module:
    """Six convolutions of 16, 32 and 64 channels, max pooling after each pair, and one linear layer."""
    layers: list[nn.Module] = [nn.Unflatten(1, (channels, side, side))] if channels == 1 else []
    for size in (16, 32, 64):
        for _ in range(2):
            norm: list[nn.Module] = [nn.BatchNorm2d(size)] if batch_norm else []
            layers += [nn.Conv2d(channels, size, 3, padding=1), *norm, nn.ReLU()]
            channels = size
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (side // 8) ** 2, 10))


def _tabular(name: str, role: str, seconds: float, hidden: tuple[int, ...] = (100, 100)) -> Task:
    title, inputs = f"{name}, MLP {'-'.join(map(str, hidden))}", uci.info(name).inputs
    return Task(title, role, _table(name), lambda: models.MLP(inputs, hidden, 1), seconds, classes=False)


def _mlp(*sizes: int) -> Callable[[], nn.Module]:
    return lambda: models.MLP(sizes[0], sizes[1:-1], sizes[-1])


def _tasks() -> dict[str, Task]:
    thousand, ten_thousand = _fashion(1000), _cifar(10_000)
    return {
        "fashion": Task("Fashion-MNIST, MLP 400-400", CHOOSING, _fashion(), _mlp(784, 400, 400, 10), 7.5),
        "deep": Task("20,000 of Fashion-MNIST, MLP 128×6", CHOOSING, _fashion(20_000), _mlp(784, *[128] * 6, 10), 5),
        "some": Task("2,000 of Fashion-MNIST, MLP 200", CHOOSING, _fashion(2000), _mlp(784, 200, 10), 2),
        "digits": Task("1,400 digits, MLP 200-200", CHOOSING, _small_digits, _mlp(64, 200, 200, 10), 2),
        "convnet-bn": Task("10,000 of CIFAR-10, batch norm", CHOOSING, ten_thousand, lambda: convnet(True), 12),
        "protein": _tabular("protein", CHOOSING, 2),
        "concrete": _tabular("concrete", CHOOSING, 1),
        "kin8nm": _tabular("kin8nm", CHOOSING, 2),
        "few": Task("1,000 of Fashion-MNIST, MLP 100", REPORTING, thousand, _mlp(784, 100, 10), 2),
        "wide": Task("1,400 digits, 135 weights each", REPORTING, _small_digits, _mlp(64, 400, 400, 10), 3),
        "convnet": Task("10,000 of CIFAR-10, no batch norm", REPORTING, ten_thousand, lambda: convnet(False), 12),
        "resnet": Task("5,000 of CIFAR-10, ResNet-20", REPORTING, _cifar(5000), models.ResNet20, 20),
        "sequence": Task("sequences, transformer", CHOOSING, _sequences, SequenceClassifier, 8),
        "power": _tabular("power", CHOOSING, 2),
        "wine": _tabular("wine", CHOOSING, 1),
        "energy": _tabular("energy", CHOOSING, 1),
        "grey": Task(
            "10,000 of Fashion-MNIST, convnet", REPORTING, _fashion(10_000), lambda: convnet(False, 1, 28), 12
        ),
        "recurrent": Task("2,000 sequences, LSTM", REPORTING, _counts, RecurrentClassifier, 5),
        "cancer": Task("breast cancer, MLP 50-50", REPORTING, _packaged("breast_cancer", True), _mlp(30, 50, 50, 2), 1),
        "diabetes": Task(
            "diabetes, MLP 50-50", REPORTING, _packaged("diabetes", False), _mlp(10, 50, 50, 1), 1, classes=False
        ),
        "year": _tabular("year", REPORTING, 2),
        "naval": _tabular("naval", REPORTING, 2),
        "yacht": _tabular("yacht", REPORTING, 1),
    }


TASKS: Mapping[str, Task] = MappingProxyType(_tasks())


def named(name: str) -> Task:
    """Returns the task called ``name``."""
    return TASKS[checks.choice("task", name, TASKS)]

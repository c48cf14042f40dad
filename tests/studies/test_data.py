"""Tables and splits, metrics, and the training loop's walk through the data."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eigenoise as en
from eigenoise.distributions.mixtures import GaussianMixture
from eigenoise.inference import metrics
from eigenoise.optim.training import epochs
from eigenoise.studies.data import Table, boston, split

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64 against numpy
ROWS, COLUMNS = 40, 3


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(wanted), **CLOSE)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numbered(rows: int = ROWS) -> Table:
    """The target of a row is its number, so that a split's rows can be told."""
    x = np.random.default_rng(0).normal(3.0, 5.0, (rows, COLUMNS))
    return Table("numbered", x, np.arange(rows, dtype=np.float64))


def rows_of(splits: Any, part: str, i: int) -> np.ndarray:
    """Which rows of a numbered table are in a part of split ``i``."""
    y = getattr(splits, f"y_{part}")[i] * splits.y_std[i] + splits.y_mean[i]
    return y.squeeze(-1).round().long().numpy()


# Splits

SEEDS = [0, 1, 7]


def test_parts_are_disjoint_and_complete() -> None:
    splits = split(numbered(), SEEDS, 0.1, dtype=torch.float64)
    for i in range(len(SEEDS)):
        train, test = rows_of(splits, "train", i), rows_of(splits, "test", i)
        assert len(train) == 36
        assert len(test) == 4
        assert sorted([*train, *test]) == list(range(ROWS))


def test_only_the_training_part_is_looked_at() -> None:
    table = numbered()
    splits = split(table, SEEDS, 0.25, dtype=torch.float64)
    for i in range(len(SEEDS)):
        train, test = rows_of(splits, "train", i), rows_of(splits, "test", i)
        mean, std = table.x[train].mean(0), table.x[train].std(0)
        close(splits.x_train[i], (table.x[train] - mean) / std)
        close(splits.x_test[i], (table.x[test] - mean) / std)
        close(splits.y_mean[i].squeeze(), table.y[train].mean())
        close(splits.y_std[i].squeeze(), table.y[train].std())
        close(splits.x_train[i].mean(0), np.zeros(COLUMNS))
        close(splits.x_train[i].std(0, correction=0), np.ones(COLUMNS))
        close(splits.y_train[i].std(0, correction=0), np.ones(1))


def test_what_is_in_the_test_part_cannot_change_the_training_part() -> None:
    table = numbered()
    before = split(table, [3], dtype=torch.float64)
    test = rows_of(before, "test", 0)
    x, y = table.x.copy(), table.y.copy()
    x[test], y[test] = 1e6, -1e6
    after = split(Table("changed", x, y), [3], dtype=torch.float64)
    assert torch.equal(after.x_train, before.x_train)
    assert torch.equal(after.y_train, before.y_train)
    assert torch.equal(after.y_mean, before.y_mean)
    assert not torch.equal(after.x_test, before.x_test)


def test_shapes_and_dtype() -> None:
    splits = split(numbered(), SEEDS)
    assert splits.x_train.shape == (3, 36, COLUMNS)
    assert splits.y_train.shape == (3, 36, 1)
    assert splits.x_test.shape == (3, 4, COLUMNS)
    assert splits.y_test.shape == (3, 4, 1)
    assert splits.y_mean.shape == splits.y_std.shape == (3, 1, 1)
    assert {t.dtype for t in vars(splits).values()} == {torch.float32}
    assert {t.dtype for t in vars(split(numbered(), [0], dtype=torch.float64)).values()} == {torch.float64}


def test_a_split_depends_on_its_seed_alone() -> None:
    one, again = (split(numbered(), SEEDS) for _ in range(2))
    other = split(numbered(), (7, 5))
    for name, value in vars(one).items():
        assert torch.equal(value, getattr(again, name))
        assert torch.equal(value[2], getattr(other, name)[0])  # seed 7, wherever it stands
        assert not torch.equal(value[0], value[1])
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    split(numbered(), range(2))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_the_table_is_left_as_it_is() -> None:
    table, kept = numbered(), numbered()
    split(table, SEEDS)
    assert np.array_equal(table.x, kept.x)
    assert np.array_equal(table.y, kept.y)


@pytest.mark.parametrize(("fraction", "test_rows"), [(0.1, 4), (0.25, 10), (1e-9, 1), (0.9, 36)])
def test_the_size_of_the_test_part(fraction: float, test_rows: int) -> None:
    assert split(numbered(), [0], fraction).x_test.shape[1] == test_rows


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3, 18.7, -396.9, 1e6 + 0.1])
def test_a_constant_column_is_only_centred(value: float) -> None:
    """Also if the sum of the column rounds, so that its computed standard deviation is not quite zero."""
    table = numbered()
    table.x[:, 1] = value
    splits = split(table, range(5), dtype=torch.float64)
    for part in (splits.x_train, splits.x_test):
        assert bool(torch.isfinite(part).all())
        assert float(part[..., 1].abs().max()) < 1e-8


@pytest.mark.parametrize("value", [0.0, 0.1, 18.7])
def test_a_column_that_is_constant_in_the_training_part_stays_in_its_units(value: float) -> None:
    table = numbered()
    row = int(rows_of(split(table, [0], dtype=torch.float64), "test", 0)[0])
    table.x[:, 1] = value
    table.x[row, 1] = value + 2.5
    close(split(table, [0], dtype=torch.float64).x_test[0, 0, 1], torch.tensor(2.5, dtype=torch.float64))


@pytest.mark.parametrize("value", [0.0, 0.1, 18.7])
def test_a_constant_target_is_only_centred(value: float) -> None:
    splits = split(Table("constant", numbered().x, np.full(ROWS, value)), range(3), dtype=torch.float64)
    close(splits.y_std, torch.ones(3, 1, 1, dtype=torch.float64))
    close(splits.y_mean, torch.full((3, 1, 1), value, dtype=torch.float64))
    close(splits.y_test, torch.zeros_like(splits.y_test))


@pytest.mark.parametrize(
    ("rows", "seeds", "fraction", "message"),
    [
        (ROWS, [], 0.1, "splits: expected at least one, got none"),
        (2, [0], 0.1, "rows: expected at least 3 to split, got 2"),
        (3, [0], 0.9, "rows: expected at least 3"),
        (ROWS, [0], 0.0, "test_fraction must be .* greater than 0"),
        (ROWS, [0], 1.0, "test_fraction must be .* at most 0.99, got 1.0"),
        (ROWS, [0], -0.1, "test_fraction"),
        (ROWS, [0], float("nan"), "test_fraction"),
    ],
)
def test_splits_that_cannot_be(rows: int, seeds: list[int], fraction: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(numbered(rows), seeds, fraction)


@pytest.mark.parametrize("fraction", [True, "0.1", None])
def test_the_fraction_must_be_a_number(fraction: Any) -> None:
    with pytest.raises(TypeError, match="test_fraction must be a number"):
        split(numbered(), [0], fraction)


# Boston


def test_boston_is_a_table_of_506_rows() -> None:
    pytest.importorskip("mlxtend")
    table = boston()
    assert table.name == "boston"
    assert table.x.shape == (506, 13)
    assert table.y.shape == (506,)
    assert table.x.dtype == table.y.dtype == np.float64
    assert np.isfinite(table.x).all()
    assert (table.y.min(), table.y.max()) == (5.0, 50.0)


def test_boston_is_the_published_set() -> None:
    pytest.importorskip("mlxtend")
    root = os.environ.get("EIGENOISE_DATA")
    if not root:
        pytest.skip("EIGENOISE_DATA does not name a folder with the UCI sets")
    folder = Path(root, "uci", "bostonHousing", "data")
    if not folder.is_dir():
        pytest.skip("the folder that EIGENOISE_DATA names does not hold uci/bostonHousing")
    data = np.loadtxt(folder / "data.txt")
    features = np.loadtxt(folder / "index_features.txt", dtype=int)
    column = int(np.loadtxt(folder / "index_target.txt", dtype=int))
    table = boston()
    assert np.array_equal(table.x, data[:, features])
    assert np.array_equal(table.y, data[:, column])


def test_without_mlxtend_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"pip install 'eigenoise\[demo\]'"):
        boston()


# Metrics

LEADS: list[tuple[int, ...]] = [(), (2,), (3, 2)]
leads = pytest.mark.parametrize("lead", LEADS, ids=str)


def mixture(lead: tuple[int, ...]) -> GaussianMixture:
    return GaussianMixture(randn(4, *lead, 50, 2), randn(4, *lead, 50, 2, seed=1).exp())


@leads
def test_rmse_is_numpys(lead: tuple[int, ...]) -> None:
    mean, y = randn(*lead, 50, 2), randn(*lead, 50, 2, seed=1)
    close(metrics.rmse(mean, y), np.sqrt(((mean - y).numpy() ** 2).mean((-2, -1))))


@pytest.mark.parametrize("shape", [(50,), (50, 1), (1, 50, 2), (1, 2)])
def test_rmse_never_broadcasts(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"y must have the shape \(50, 2\)"):
        metrics.rmse(randn(50, 2), randn(*shape))


@leads
def test_log_likelihood_is_numpys(lead: tuple[int, ...]) -> None:
    q, y = mixture(lead), randn(*lead, 50, 2, seed=2)
    loc, scale = q.loc.numpy(), q.scale.numpy()
    density = np.exp(-0.5 * ((y.numpy() - loc) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
    close(metrics.log_likelihood(q, y), np.log(density.prod(-1).mean(0)).mean(-1))


@leads
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_is_numpys(lead: tuple[int, ...], level: float) -> None:
    q, y = mixture(lead), randn(*lead, 50, 2, seed=2)
    low, high = (bound.numpy() for bound in q.interval(level))
    got = metrics.coverage(q, y, level)
    close(got, ((low <= y.numpy()) & (y.numpy() <= high)).mean((-2, -1)))
    assert got.shape == lead
    assert bool((got > 0).all())


def test_coverage_counts_all_and_nothing() -> None:
    q = mixture(())
    assert metrics.coverage(q, q.quantile(0.5)) == 1.0
    assert metrics.coverage(q, q.quantile(0.97)) == 0.0
    assert metrics.coverage(q, q.quantile(0.97), level=0.95) == 1.0


# The training loop


class Watched(nn.Module):
    """A model that notes which rows it saw: the first input is the row's number."""

    def __init__(self, stack: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.inner = en.models.MLP(2, [3], 1, stack=stack).double()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x[..., 0].round().long())
        return self.inner(x / ROWS)


def rows(*lead: int) -> tuple[Tensor, Tensor]:
    number = torch.arange(ROWS, dtype=torch.float64).expand(*lead, ROWS)
    return torch.stack([number, randn(*lead, ROWS)], -1), randn(*lead, ROWS, 1, seed=1)


def watched(stack: int | None = None, method: Any = en.NoisyEKFAC, **options: Any) -> Any:
    likelihood = en.GaussianLikelihood(stack=stack)
    return method(Watched(stack), num_data=ROWS, likelihood=likelihood, **options)


RATES = ("lr", "ema_factors", "ema_scale")


def note_rates(opt: Any, names: tuple[str, ...]) -> list[tuple[float, ...]]:
    noted: list[tuple[float, ...]] = []

    def note(*_: Any) -> None:
        noted.append(tuple(opt.param_groups[0][name] for name in names))

    opt.register_step_post_hook(note)
    return noted


@pytest.mark.parametrize("samples", [1, 2])
def test_each_pass_visits_every_row_once(samples: int) -> None:
    opt = watched(samples=samples)
    done = []
    for epoch in epochs(opt, *rows(), count=3, batch_size=16):
        done.append(epoch)
        seen, opt.model.seen = opt.model.seen, []
        assert [len(batch) for batch in seen] == [size for size in (16, 16, 8) for _ in range(samples)]
        for i in range(samples):
            assert sorted(torch.cat(seen[i::samples]).tolist()) == list(range(ROWS))
        assert torch.cat(seen[::samples]).tolist() != list(range(ROWS))
    assert done == [1, 2, 3]
    assert opt.steps == 9


def test_each_member_of_a_stack_visits_every_row_once_in_its_own_order() -> None:
    opt = watched(stack=3)
    for _ in epochs(opt, *rows(3), count=2, batch_size=16):
        order = torch.cat(opt.model.seen, -1)
        opt.model.seen = []
        assert order.shape == (3, ROWS)
        assert torch.equal(order.sort(-1).values, torch.arange(ROWS).expand(3, ROWS))
        assert len({tuple(member) for member in order.tolist()}) == 3


@pytest.mark.parametrize("stack", [None, 2])
def test_inputs_and_targets_stay_together(stack: int | None) -> None:
    opt = watched(stack)
    x, _ = rows() if stack is None else rows(stack)
    y = x[..., :1] * 10 + (0 if stack is None else torch.arange(2.0).reshape(2, 1, 1))
    pairs: list[tuple[Tensor, Tensor]] = []
    nll = opt.likelihood.nll

    def spy(f: Tensor, y: Tensor) -> Tensor:
        pairs.append((opt.model.seen[-1], y))
        return nll(f, y / 1000)

    opt.likelihood.nll = spy
    list(epochs(opt, x, y, count=1, batch_size=16))
    assert len(pairs) == 3
    for number, target in pairs:
        member = 0 if stack is None else torch.arange(2).unsqueeze(-1)
        assert torch.equal(target.squeeze(-1), (number * 10 + member).double())


def test_the_order_follows_the_generator() -> None:
    orders = []
    for seed in (1, 1, 2):
        opt = watched()
        list(epochs(opt, *rows(), count=2, batch_size=16, generator=torch.Generator().manual_seed(seed)))
        orders.append(torch.cat(opt.model.seen))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0][:ROWS], orders[0][ROWS:])  # each pass has its own


def test_rates_decay_in_the_second_half_and_are_restored() -> None:
    opt = watched()
    start = {name: opt.param_groups[0][name] for name in RATES}
    noted = note_rates(opt, RATES)
    assert list(epochs(opt, *rows(), count=4, batch_size=20, decay=0.25)) == [1, 2, 3, 4]
    full, low = tuple(start.values()), tuple(0.25 * value for value in start.values())
    assert noted == [full] * 4 + [low] * 4
    assert {name: opt.param_groups[0][name] for name in RATES} == start


def test_only_the_named_rates_decay() -> None:
    opt = watched()
    before = dict(opt.param_groups[0])
    noted = note_rates(opt, ("lr", "damping", "ema_scale"))
    list(epochs(opt, *rows(), count=2, batch_size=ROWS, decayed=("lr",)))
    assert noted[1] == (pytest.approx(0.1 * before["lr"]), before["damping"], before["ema_scale"])
    assert opt.param_groups[0]["lr"] == before["lr"]


def test_a_method_without_those_rates_is_trained_as_well() -> None:
    opt = watched(method=en.BayesByBackprop)
    noted = note_rates(opt, ("lr",))
    list(epochs(opt, *rows(), count=2, batch_size=ROWS))
    assert noted == [(0.01,), (pytest.approx(0.001),)]
    assert opt.param_groups[0]["lr"] == 0.01
    assert "ema_factors" not in opt.param_groups[0]


def test_rates_are_restored_when_the_caller_stops_early() -> None:
    opt = watched()
    start = {name: opt.param_groups[0][name] for name in RATES}
    walk = epochs(opt, *rows(), count=4, batch_size=ROWS)
    for epoch in walk:
        if epoch == 3:
            break
    walk.close()
    assert {name: opt.param_groups[0][name] for name in RATES} == start


def test_rates_are_restored_after_an_exception() -> None:
    opt = watched()
    start = {name: opt.param_groups[0][name] for name in RATES}

    def fail(*_: Any) -> None:
        if opt.steps == 3:
            raise KeyError("the last batch")

    opt.model.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="the last batch"):
        list(epochs(opt, *rows(), count=4, batch_size=ROWS))
    assert {name: opt.param_groups[0][name] for name in RATES} == start


@pytest.mark.parametrize("name", ["count", "batch_size"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_wrong_numbers_are_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} must be"):
        list(epochs(watched(), *rows(), **{"count": 1, "batch_size": 8, name: value}))


def test_training_learns() -> None:
    torch.manual_seed(0)
    x = randn(200, 2)
    y = (x[:, :1] - 2 * x[:, 1:]).tanh()
    model = en.models.MLP(2, [10], 1).double()
    opt = en.NoisyEKFAC(model, num_data=200, likelihood=en.GaussianLikelihood(), lr=0.1, layer_clip=None)
    before = metrics.rmse(en.predict(model, opt, x).mean, y)
    list(epochs(opt, x, y, count=10, batch_size=20, generator=torch.Generator().manual_seed(0)))
    assert metrics.rmse(en.predict(model, opt, x).mean, y) < 0.5 * before

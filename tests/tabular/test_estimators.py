"""scikit-learn estimators: its own checks, predictions, weights, ensembles, going on, bad input."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from eigenoise.tabular import BayesianMLPClassifier, BayesianMLPRegressor, estimator
from eigenoise.tabular.calibration import Calibration
from eigenoise.tabular.model_selection import Selection, smoothed_best, uncalibrated
from eigenoise.tabular.network import Candidate, Stack
from eigenoise.tabular.rows import Rows, Scale, sample_epoch, validation_splits

SHORT = {"hidden_layer_sizes": 10, "max_epochs": 10, "lr": 0.03, "random_state": 0}
FIXED = {**SHORT, "kl_weight": 0.3, "prior_var": 1.0, "early_stopping": False}


@parametrize_with_checks(
    [
        BayesianMLPRegressor(**{**FIXED, "max_epochs": 20}),
        BayesianMLPClassifier(**{**FIXED, "max_epochs": 20}),
    ]
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return x[:300], y[:300], x[300:], y[300:]


@pytest.fixture(scope="module")
def fitted(diabetes):
    x, y, *_ = diabetes
    return BayesianMLPRegressor(**SHORT).fit(x, y)


# Rows.


def test_a_weight_is_a_number_of_equal_rows():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(20, 3)), random.normal(size=(20, 2))
    weight = np.arange(20) % 4
    again = random.permutation(np.repeat(np.arange(20), weight))
    one, other = Rows.from_arrays(x, y, weight), Rows.from_arrays(x[again], y[again])
    assert len(one) == 15
    assert one.total == weight.sum()
    for a, b in ((one.x, other.x), (one.y, other.y), (one.weight, other.weight)):
        assert torch.equal(a, b)


def test_zeros_of_both_signs_are_one_row():
    assert len(Rows.from_arrays(np.array([[0.0], [-0.0]]), np.array([1, 1]))) == 1


def test_a_pass_shows_each_row_as_often_as_it_weighs():
    generator = torch.Generator().manual_seed(0)
    weight = torch.tensor([[1.0, 2.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    counts = torch.zeros(2, 4)
    for _ in range(200):
        places = sample_epoch(weight, generator)
        assert places.shape == (2, 4)
        assert sorted(places[1].tolist()) == [0, 1, 2, 3]
        for j, row in enumerate(places):
            counts[j] += row.bincount(minlength=4)
    assert counts[0, :2].tolist() == [200, 400]
    assert counts[0, 2:].sum() == 200
    assert 60 < counts[0, 2] < 140


def test_held_out_parts_cover_the_table_and_every_class():
    y = np.repeat([0, 1], [80, 20])
    rows = Rows.from_arrays(np.arange(100.0)[:, None], y)
    train, held = validation_splits(rows, 5, 0.2, torch.Generator().manual_seed(0))
    assert held.flatten().sort().values.tolist() == list(range(100))
    assert all(not set(t.tolist()) & set(h.tolist()) for t, h in zip(train, held, strict=True))
    assert rows.y[held].sum(-1).tolist() == [4, 4, 4, 4, 4]


def test_scale_leaves_constant_columns_in_their_unit():
    x = torch.tensor([[1.0, 0.1], [3.0, 0.1]], dtype=torch.float64)
    scale = Scale.fit(x, torch.tensor([1.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(scale.mean, torch.tensor([2.5, 0.1], dtype=torch.float64))
    torch.testing.assert_close(scale.std, torch.tensor([0.75**0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(scale.restore(scale.standardise(x)), x)


# Predictions.


def test_predictions_fit_together(fitted, diabetes):
    *_, x, y = diabetes
    mean, std = fitted.predict(x, return_std=True)
    low, high = fitted.predict_interval(x, coverage=0.9)
    quantiles = fitted.predict_quantiles(x, (0.05, 0.5, 0.95))
    drawn = fitted.sample_y(x, 2000)
    assert mean.shape == std.shape == low.shape == (142,)
    assert quantiles.shape == (142, 3)
    assert drawn.shape == (142, 2000)
    np.testing.assert_allclose(quantiles[:, 0], low)
    np.testing.assert_allclose(quantiles[:, 2], high)
    assert np.abs(drawn.mean(1) - mean).max() < 0.15 * std.min() + 5
    np.testing.assert_allclose(drawn.std(1), std, rtol=0.1)
    assert fitted.score(x, y) > 0.4
    assert 0.8 < ((low <= y) & (y <= high)).mean() <= 1.0
    assert fitted.log_likelihood(x, y) > -5.6
    np.testing.assert_array_equal(fitted.predict(x), mean)


def test_probabilities_and_labels():
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    one = BayesianMLPClassifier(**SHORT, members=2).fit(x[::2], names[::2])
    probs = one.predict_proba(x)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert one.score(x[1::2], names[1::2]) > 0.85
    assert set(one.sample_y(x, 5).flatten()) <= set(one.classes_)
    assert one.log_likelihood(x, names) == pytest.approx(np.log(probs[np.arange(150), y]).mean())
    assert one.log_likelihood(x[:2], ["setosa", "rose"]) == -np.inf


def test_several_targets_have_noise_of_their_own(diabetes):
    x, y, *_ = diabetes
    both = np.c_[y, x[:, 0] * 100 + 7]  # the second can be known exactly
    one = BayesianMLPRegressor(**{**SHORT, "max_epochs": 40}).fit(x, both)
    mean, std = one.predict(x, return_std=True)
    assert mean.shape == std.shape == (300, 2)
    assert one.noise_scale_.shape == (2,)
    assert one.noise_scale_[1] < one.noise_scale_[0]
    assert one.predict_quantiles(x).shape == (300, 2, 3)
    assert one.sample_y(x, 4).shape == (300, 2, 4)


def test_the_same_seed_gives_the_same_and_another_does_not(diabetes):
    x, y, *_ = diabetes
    first, second = (BayesianMLPRegressor(**FIXED).fit(x, y).predict(x) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    other = BayesianMLPRegressor(**{**FIXED, "random_state": 1}).fit(x, y).predict(x)
    assert not np.array_equal(first, other)


def test_training_leaves_the_global_random_numbers_alone(diabetes):
    x, y, *_ = diabetes
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    BayesianMLPRegressor(**FIXED).fit(x, y)
    assert torch.equal(torch.rand(3), wanted)


def test_members_are_different_networks(diabetes):
    x, y, *_ = diabetes
    one = BayesianMLPRegressor(**FIXED, members=3, samples=30).fit(x, y)
    means = one.posterior_.mean["0.weight"]
    assert means.shape[0] == 3
    assert not torch.allclose(means[0], means[1])
    assert one.predictive(x[:2]).loc.shape == (30, 2, 1)


def test_what_is_given_is_not_chosen(diabetes):
    x, y, *_ = diabetes
    fixed = BayesianMLPRegressor(**FIXED).fit(x, y)
    assert (fixed.kl_weight_, fixed.n_iter_) == (0.3, 10)
    assert np.isnan(fixed.validation_log_likelihood_)
    given = BayesianMLPRegressor(**SHORT, kl_weight=0.5).fit(x, y)
    assert given.kl_weight_ == 0.5
    assert given.prior_var_ in (0.1, 0.3, 1.0)
    assert given.n_iter_ <= 10
    other = BayesianMLPRegressor(**SHORT, prior_var=0.7).fit(x, y)
    assert other.prior_var_ == 0.7
    assert other.kl_weight_ in (0.1, 0.3, 1.0)
    assert np.isfinite(given.validation_log_likelihood_)


def test_the_next_pair_must_be_clearly_better():
    def gains(each, weight):
        each = torch.tensor(each)
        other = Selection(
            Candidate((), 1.0, 1.0), 5, *uncalibrated(1), 0.0, torch.zeros_like(each), torch.tensor(weight)
        )
        return Selection(
            Candidate((5,), 1.0, 0.1), 5, *uncalibrated(1), 0.0, each, torch.tensor(weight)
        ).significantly_better_than(other)

    unclear = [1.0] * 50 + [-0.9] * 50  # 0.05 in the mean, 0.095 its standard error
    assert not gains(unclear, [1.0] * 100)
    assert not gains([gain + 0.1 for gain in unclear], [1.0] * 100)
    assert gains([gain + 0.2 for gain in unclear], [1.0] * 100)
    assert not gains([0.0] * 9, [1.0] * 9)
    assert gains([1.0, -0.8], [500.0, 500.0])  # a weight counts observations
    assert not gains([1.0, -0.8], [2.0, 2.0])
    assert not gains([1e-9], [1.0])  # one row says nothing
    assert gains([float("inf"), 0.0], [1.0, 1.0])
    assert not gains([float("-inf"), 9.0], [1.0, 1.0])
    assert not gains([float("nan"), 9.0], [1.0, 1.0])


def test_a_linear_model_is_used_where_nothing_is_gained(diabetes, capsys):
    x, _, *_ = diabetes
    noise = np.random.default_rng(0).normal(size=300)  # nothing to learn: no network is better than a linear model
    one = BayesianMLPRegressor(**SHORT, verbose=True).fit(x, noise)
    assert (one.hidden_layer_sizes_, one.kl_weight_, one.prior_var_) == ((), 1.0, 1.0)
    assert list(one.posterior_.mean) == ["0.weight", "0.bias"]
    said = capsys.readouterr().err
    for tried in ("linear, λ = 1, η = 1", "λ = 1, η = 0.1", "λ = 0.3, η = 0.3", "λ = 0.1, η = 1"):
        assert f"{tried}: done" in said


def test_a_network_is_used_where_a_line_will_not_do():
    x = np.random.default_rng(0).normal(size=(200, 2))
    y = np.abs(x[:, 0]) + 0.01 * x[:, 1]
    one = BayesianMLPRegressor(max_epochs=30, lr=0.03, members=1, random_state=0).fit(x, y)
    assert one.hidden_layer_sizes_ == (50,)
    assert one.score(x, y) > 0.9


def test_a_rough_function_is_not_taken_for_a_line():
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 2))
    y = np.sin(4 * x[:, 0]) + 0.05 * random.normal(size=100)  # the first network tried is not better than a line
    one = BayesianMLPRegressor(members=1, random_state=0).fit(x, y)
    assert one.hidden_layer_sizes_ == (50,)
    assert one.score(x, y) > 0.5


@pytest.mark.parametrize("rows", [5, 20])
def test_few_rows_make_intervals_that_are_wide_enough(rows):
    random = torch.Generator().manual_seed(0)
    inside = []
    for _ in range(400):
        below = torch.rand(rows, generator=random, dtype=torch.float64)  # what is right for a perfect prediction
        found = Calibration.fit([below], torch.ones(rows, dtype=torch.float64))
        inside.append(found.quantile(0.95, 0) - found.quantile(0.05, 0))
    assert 0.88 < sum(inside) / 400 < 0.93


def test_intervals_are_as_wide_as_held_out_rows_ask_for():
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, generator=random, dtype=torch.float64)
    below = torch.special.ndtr(truth / 2)  # a distribution that claims twice the spread
    half = Calibration.fit([below, torch.special.ndtr(truth)], torch.ones(4000, dtype=torch.float64))
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        wanted = torch.special.ndtr(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)) / 2)
        assert half.quantile(q, 0) == pytest.approx(float(wanted), abs=0.02)
        assert half.quantile(q, 1) == pytest.approx(q, abs=0.02)
        assert Calibration.identity(1).quantile(q, 0) == pytest.approx(q)
    assert half.quantile(1e-12, 0) > 0
    few = Calibration.fit([torch.tensor([0.5, 0.9])], torch.tensor([3.0, 1.0], dtype=torch.float64))
    many = Calibration.fit([torch.tensor([0.5, 0.5, 0.5, 0.9])], torch.ones(4, dtype=torch.float64))
    assert few.quantile(0.99, 0) == pytest.approx(many.quantile(0.99, 0))  # a weight counts observations
    assert bool((half.levels.diff() >= 0).all())


def test_heavy_tails_do_not_widen_every_interval():
    random = np.random.default_rng(0)
    x = random.normal(size=(600, 2))
    y = x[:, 0] + random.standard_t(2, size=600)
    one = BayesianMLPRegressor(max_epochs=10, random_state=0).fit(x[:400], y[:400])
    low, high = one.predict_interval(x[400:], 0.5)
    inside = np.mean((low <= y[400:]) & (y[400:] <= high))
    wide = one.predictive(x[400:]).interval(0.5)
    too_many = np.mean((wide[0].numpy()[:, 0] <= y[400:]) & (y[400:] <= wide[1].numpy()[:, 0]))
    assert abs(inside - 0.5) < 0.1 < too_many - 0.5
    quantiles = one.predict_quantiles(x[400:], (0.25, 0.5, 0.75))
    np.testing.assert_allclose(quantiles[:, 0], low)
    np.testing.assert_allclose(quantiles[:, 2], high)


@pytest.mark.parametrize("kind", [BayesianMLPRegressor, BayesianMLPClassifier])
def test_a_single_division_is_tried_with_the_whole_ensemble(diabetes, kind, monkeypatch):
    x, y, *_ = diabetes
    sizes = []
    init = Stack.__init__
    monkeypatch.setattr(Stack, "__init__", lambda self, *a: (init(self, *a), sizes.append(tuple(self.index.shape)))[0])
    monkeypatch.setattr(estimator, "MAX_ROWS_FOR_CROSS_VALIDATION", 100)
    one = kind(**SHORT, kl_weight=1.0, prior_var=1.0, members=3).fit(x, y if kind is BayesianMLPRegressor else y > 140)
    assert sizes == [(3, 240), (3, 300)]
    assert np.isfinite(one.validation_log_likelihood_)


def test_small_networks_train_with_one_thread_and_leave_the_number_as_it_was(diabetes, monkeypatch):
    x, y, *_ = diabetes
    torch.set_num_threads(2)
    used = []
    epochs = Stack.epochs
    monkeypatch.setattr(Stack, "epochs", lambda self, n: (used.append(torch.get_num_threads()), epochs(self, n))[1])
    BayesianMLPRegressor(**FIXED).fit(x, y)
    monkeypatch.setattr(estimator, "MAX_SINGLE_THREAD_WIDTH", 5)
    BayesianMLPRegressor(**FIXED).fit(x, y)
    assert used == [1, 2]
    assert torch.get_num_threads() == 2


def test_no_lucky_look_decides():
    def look(epoch, value):
        return Selection(Candidate((), 1.0, 1.0), epoch, *uncalibrated(1), value)

    values = [0.0, 9.0, 0.0, 5.0, 5.0, 5.0, 4.0]
    assert smoothed_best([look(i, value) for i, value in enumerate(values)]).epochs == 4
    assert smoothed_best([look(0, float("nan")), look(1, -3.0), look(2, -3.0)]).epochs == 2
    assert smoothed_best([look(0, float("nan"))]).epochs == 0


def test_without_early_stopping_all_passes_are_made(diabetes):
    x = diabetes[0]
    one = BayesianMLPRegressor(**{**SHORT, "max_epochs": 7}, early_stopping=False).fit(
        x, np.random.default_rng(0).normal(size=300)
    )
    assert one.n_iter_ == 7
    assert np.isfinite(one.validation_log_likelihood_)


def test_numbers_of_numpys_are_numbers(diabetes):
    x, y, *_ = diabetes
    options = {
        "batch_size": np.int64(20),
        "max_epochs": np.int64(2),
        "members": np.int64(1),
        "prior_var": np.float32(1),
    }
    one = BayesianMLPRegressor(**{**FIXED, **options, "hidden_layer_sizes": np.int64(4)}).fit(x, y)
    assert one.predict(x).shape == (300,)


def test_weights_of_any_size_are_borne(diabetes):
    x, y, *_ = diabetes
    for weight in (1e12, 1e-3):
        one = BayesianMLPRegressor(**FIXED).fit(x, y, sample_weight=np.full(300, weight))
        assert np.isfinite(one.predict(x)).all()


@pytest.mark.parametrize("factor", [1e160, 1e-170])
def test_targets_of_any_size_are_borne(diabetes, factor):
    x, y, *_ = diabetes
    plain, scaled = (BayesianMLPRegressor(**FIXED).fit(x, y * f).predict(x) / f for f in (1.0, factor))
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)


@pytest.mark.parametrize("method", ["noisy-kfac", "noisy-adam", "bbb"])
def test_other_methods_learn(diabetes, method):
    x, y, *_ = diabetes
    assert BayesianMLPRegressor(**{**FIXED, "max_epochs": 30}, method=method).fit(x, y).score(x, y) > 0.3


@pytest.mark.parametrize("activation", ["tanh", "logistic", "silu", "gelu"])
def test_other_activations_learn(diabetes, activation):
    x, y, *_ = diabetes
    assert BayesianMLPRegressor(**FIXED, activation=activation).fit(x, y).score(x, y) > 0.3


# Living with scikit-learn.


def test_a_warm_start_goes_on(diabetes):
    x, y, *_ = diabetes
    one = BayesianMLPRegressor(**{**FIXED, "max_epochs": 3}, warm_start=True).fit(x, y)
    first = one.log_likelihood(x, y)
    scale = one.x_scale_
    assert one.fit(x[:200], y[:200]).x_scale_ is scale
    assert one.log_likelihood(x, y) > first
    with pytest.raises(ValueError, match="warm_start continues with the networks of the last fit"):
        one.set_params(hidden_layer_sizes=7).fit(x, y)
    one.set_params(hidden_layer_sizes=10)
    with pytest.raises(ValueError, match="expecting 10 features"):
        one.fit(x[:, :2], y)
    with pytest.raises(ValueError, match="as many targets as in the last fit"):
        one.fit(x, np.c_[y, y])
    assert one.predict(x).shape == (300,)
    classifier = BayesianMLPClassifier(**FIXED, warm_start=True).fit(x, y > 100)
    with pytest.raises(ValueError, match="classes of the last fit"):
        classifier.fit(x, np.digitize(y, [100, 200]))


def test_pipelines_searches_clones_and_pickles(diabetes, tmp_path):
    x, y, *_ = diabetes
    pipeline = make_pipeline(StandardScaler(), BayesianMLPRegressor(**FIXED))
    assert np.mean(cross_val_score(pipeline, x, y, cv=2)) > 0.2
    search = GridSearchCV(BayesianMLPRegressor(**FIXED), {"kl_weight": [0.1, 1.0]}, cv=2).fit(x, y)
    assert search.best_params_["kl_weight"] in (0.1, 1.0)
    wrapped = TransformedTargetRegressor(BayesianMLPRegressor(**FIXED), func=np.log, inverse_func=np.exp).fit(x, y)
    assert wrapped.score(x, y) > 0.2
    one = clone(BayesianMLPRegressor(**FIXED)).fit(x, y)
    joblib.dump(one, tmp_path / "one.joblib")
    for other in (pickle.loads(pickle.dumps(one)), joblib.load(tmp_path / "one.joblib")):
        np.testing.assert_array_equal(other.predict(x), one.predict(x))


def test_several_threads_may_ask_at_once(fitted, diabetes):
    x, *_ = diabetes
    wanted = [fitted.predict(x[i::4]) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found, own in zip(pool.map(lambda i: fitted.predict(x[i % 4 :: 4]), range(16)), wanted * 4, strict=True):
            np.testing.assert_array_equal(found, own)


def test_pandas_tables_and_their_names(diabetes):
    x, y, *_ = diabetes
    table = pd.DataFrame(x, columns=[f"c{i}" for i in range(10)])
    one = BayesianMLPRegressor(**FIXED).fit(table, pd.Series(y, name="progress"))
    assert list(one.feature_names_in_) == list(table.columns)
    np.testing.assert_array_equal(one.predict(table), BayesianMLPRegressor(**FIXED).fit(x, y).predict(x))
    with pytest.raises(ValueError, match="feature names"):
        one.predict(table.rename(columns={"c0": "other"}))


def test_progress_is_shown_when_asked_for(diabetes, capsys):
    x, y, *_ = diabetes
    BayesianMLPRegressor(**FIXED).fit(x, y)
    assert capsys.readouterr() == ("", "")
    BayesianMLPRegressor(**FIXED, verbose=True).fit(x, y)
    assert "all rows: done" in capsys.readouterr().err


# Bad input.


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ({"hidden_layer_sizes": (0,)}, ValueError, "hidden_layer_sizes must be at least 1, got 0"),
        ({"hidden_layer_sizes": "big"}, TypeError, "hidden_layer_sizes must be an int"),
        ({"activation": "step"}, ValueError, "activation must be one of"),
        ({"method": "adam"}, ValueError, "method must be one of"),
        ({"kl_weight": 0.0}, ValueError, "kl_weight must be a finite number greater than 0"),
        ({"prior_var": -1}, ValueError, "prior_var"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"max_epochs": 1.5}, TypeError, "max_epochs must be an int"),
        ({"patience": 0}, ValueError, "patience"),
        ({"members": 0}, ValueError, "members"),
        ({"samples": 0}, ValueError, "samples"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction"),
    ],
)
def test_bad_arguments_are_named_before_anything_happens(diabetes, argument, error, message):
    x, y, *_ = diabetes
    one = BayesianMLPRegressor(**{**SHORT, **argument})
    with pytest.raises(error, match=message):
        one.fit(x, y)
    with pytest.raises(NotFittedError):
        one.predict(x)


def test_bad_calls(fitted, diabetes):
    x, y, *_ = diabetes
    for wrong in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="coverage"):
            fitted.predict_interval(x, coverage=wrong)
    with pytest.raises(ValueError, match="quantiles must be"):
        fitted.predict_quantiles(x, (1.0,))
    with pytest.raises(ValueError, match="n_samples"):
        fitted.sample_y(x, 0)
    with pytest.raises(ValueError, match="at least one non-zero"):
        BayesianMLPRegressor(**FIXED).fit(x, y, sample_weight=np.zeros(300))
    with pytest.raises(ValueError, match="y must have the shape"):
        fitted.log_likelihood(x, y[:5])
    with pytest.raises(TypeError, match="sequence of ints, got an iterator"):
        BayesianMLPRegressor(**{**FIXED, "hidden_layer_sizes": iter([3])}).fit(x, y)
    with pytest.raises(ValueError, match="at least two classes"):
        BayesianMLPClassifier(**FIXED).fit(x, np.ones(300, int))

"""Tables from files: what columns are, learning, the model's file, predictions, bad input; by the command line."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from eigenoise.cli import app
from eigenoise.inference.posterior import Posterior
from eigenoise.tabular import BayesianMLPClassifier, BayesianMLPRegressor, learning, persistence
from eigenoise.tabular.baselines import GaussianAround, ridge
from eigenoise.tabular.columns import MISSING
from eigenoise.tabular.learning import Learned, learn
from eigenoise.tabular.reading import read_table, write_table
from eigenoise.tabular.schema import Schema

SHORT = {"hidden_layer_sizes": (8,), "max_epochs": 5, "kl_weight": 0.3, "prior_var": 1.0, "early_stopping": False}


@pytest.fixture(scope="module")
def houses():
    """Numbers, texts, dates as text, gaps, a constant and a name for every row."""
    random = np.random.default_rng(0)
    rows = 120
    frame = pd.DataFrame(
        {
            "area": random.uniform(20, 200, rows),
            "rooms": random.integers(1, 7, rows),
            "place": random.choice(["Rome", "Oslo", "Łódź"], rows),
            "sold": pd.date_range("2020-01-05", periods=rows, freq="3D").strftime("%Y-%m-%d"),
            "garden": random.choice([True, False], rows),
            "country": "here",
            "name": [f"house {i}" for i in range(rows)],
        }
    )
    frame["price"] = 3 * frame["area"] + 50 * (frame["place"] == "Oslo") + random.normal(0, 20, rows)
    frame["dear"] = np.where(frame["price"] > frame["price"].median(), "yes", "no")
    frame.loc[::9, "area"] = np.nan
    frame.loc[::11, "place"] = None
    return frame


@pytest.fixture(scope="module")
def learned(houses):
    return learn(houses, "price", drop=["dear"], **SHORT)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


# What columns are.


def test_kinds_of_columns_are_found(houses):
    schema = Schema.infer(houses, "price")
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {
        "area": "number",
        "rooms": "number",
        "place": "category",
        "sold": "date",
        "garden": "number",
        "dear": "category",
    }
    assert dict(schema.left_out) == {"country": "is constant", "name": "has another text in every row"}
    assert schema.task == "regression"
    assert Schema.infer(houses, "dear").task == "classification"
    assert Schema.infer(houses, "garden").task == "classification"
    assert Schema.infer(houses, "rooms").task == "regression"
    assert Schema.infer(houses, "rooms", "classification").task == "classification"


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["Mon", "Tue"], "category"),
        (["May", "June"], "category"),
        (["1-2", "3-4"], "category"),
        (["2021-05-03", "03.05.2022 12:30"], "date"),
        (["3 May 2021", "4 June 2022"], "date"),
        (["2021-05-03", "unknown 2021"], "category"),
        (["1999,50", "2001,25"], "category"),
    ],
)
def test_texts_are_dates_only_with_a_year(texts, kind):
    frame = pd.DataFrame({"a": texts * 10, "y": np.arange(20.0)})
    assert Schema.infer(frame, "y").columns[0].kind == kind


def test_days_come_first_in_a_column_where_some_must():
    for texts in (["03.05.2022", "25.05.2022"], ["03/05/2022", "25/05/2022"]):
        frame = pd.DataFrame({"a": texts * 10, "y": np.arange(20.0)})
        x = Schema.infer(frame, "y").inputs(frame)
        assert x[1, 0] - x[0, 0] == 22
        assert x[0, 1] == 5


def test_a_column_may_be_called_like_a_part_of_another():
    random = np.random.default_rng(0)
    days = pd.date_range("2020-01-05", periods=30, freq="3D").strftime("%Y-%m-%d")
    frame = pd.DataFrame({"sold": days, "sold (days)": random.normal(size=30), "0 days": 1.5 * random.normal(size=30)})
    x = Schema.infer(frame.assign(y=np.arange(30.0)), "y").inputs(frame)
    np.testing.assert_array_equal(np.diff(x[:, 0]), 3.0)
    np.testing.assert_array_equal(x[:, 4:], frame.iloc[:, 1:])


def test_whole_numbers_as_categories_are_known_again_with_gaps():
    frame = pd.DataFrame({"code": ["1", "2", "x"] * 10, "y": np.arange(30.0)})
    schema = Schema.infer(frame, "y")
    new = pd.DataFrame({"code": [1, 2, np.nan]})
    assert schema.inputs(new).sum(-1).tolist() == [1, 1, 0]


def test_columns_become_numbers_without_gaps(houses):
    schema = Schema.infer(houses, "price", drop=["dear", "garden"])
    x = schema.inputs(houses)
    assert x.shape == (120, 2 + 1 + 4 + 4)  # area and its gaps, rooms, three places and none, four parts of a date
    assert np.isfinite(x).all()
    assert schema.num_inputs == x.shape[1]
    gaps = houses["area"].isna().to_numpy()
    np.testing.assert_array_equal(x[:, 1], gaps)
    assert set(x[gaps, 0]) == {houses["area"].median()}
    place = next(column for column in schema.columns if column.name == "place")
    assert set(place.values) == {"Rome", "Oslo", "Łódź", MISSING}
    days = x[:, -4]
    np.testing.assert_array_equal(np.diff(days), 3.0)
    assert days[0] == (pd.Timestamp("2020-01-05") - pd.Timestamp("2000-01-01")).days
    assert x[0, -3:].tolist() == [1, 6, 0]


def test_a_schema_is_json_and_back(houses):
    schema = Schema.infer(houses, "price")
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    np.testing.assert_array_equal(again.inputs(houses[:7]), schema.inputs(houses)[:7])


def test_values_that_are_new_and_gaps_that_are_new_are_borne(houses):
    schema = Schema.infer(houses, "price", drop=["dear"])
    new = houses[:2].assign(place=["Paris", None], rooms=[np.nan, 2])
    x = schema.inputs(new)
    assert np.isfinite(x).all()
    assert x[0, 3:7].sum() == 0  # a place that nothing is known of


def test_tables_that_do_not_fit_are_refused_by_column(houses):
    schema = Schema.infer(houses, "price", drop=["dear"])
    for wrong, message in (
        (houses.drop(columns="area"), "no column 'area'"),
        (houses.rename(columns={"sold": "solde"}), "no column 'sold'; did you mean 'solde'"),
        (houses.assign(rooms="many"), "'rooms' must hold numbers, got 'many' in row 1"),
        (houses.assign(sold="soon"), "'sold' must hold dates, got 'soon' in row 1"),
        (houses.assign(area=np.inf), "'area' must hold finite numbers, got inf in row 1"),
    ):
        with pytest.raises(ValueError, match=message):
            schema.inputs(wrong)


# Learning.


def test_learning_compares_on_rows_that_no_model_saw(learned):
    assert learned.rows == (96, 24)
    assert set(learned.scores) == {"eigenoise", "ridge", "gradient boosting"}
    for own in learned.scores.values():
        assert set(own) == {"rmse", "ll", "in50", "in90"}
    grid = learned.grid()
    assert grid.title == "24 test rows"
    assert [row[0] for row in grid.rows] == list(learned.scores)


def test_rows_that_are_also_in_the_training_part_are_not_tested_on():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(40, 2)), columns=["a", "y"])
    again = pd.concat([frame] * 6, ignore_index=True)
    with pytest.raises(ValueError, match="nothing to test on"):
        learn(again, "y", **SHORT)
    some = pd.concat([frame, frame[:10]], ignore_index=True)
    assert learn(some, "y", **SHORT).rows[1] < 10


def test_what_columns_are_is_learned_from_training_rows_alone(houses):
    found = learn(houses, "price", drop=["dear"], **SHORT)
    (area,) = [column for column in found.schema.columns if column.name == "area"]
    assert area.fill[0] != houses["area"].median()


def test_classes_are_learned_from_text(houses):
    found = learn(houses, "dear", drop=["price"], **{**SHORT, "max_epochs": 30})
    assert set(found.estimator.classes_) == {"yes", "no"}
    assert found.scores["eigenoise"]["accuracy"] > 0.6
    assert set(found.scores["logistic regression"]) == {"accuracy", "ll", "ece"}
    predicted = learning.predict(found, houses)
    np.testing.assert_allclose(predicted[["dear p(no)", "dear p(yes)"]].sum(axis=1), 1.0)
    assert set(predicted["dear prediction"]) <= {"yes", "no"}


def test_a_class_of_one_row_and_targets_that_are_missing(houses):
    frame = houses.assign(dear=["rare", None, *houses["dear"][2:]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's own, of a class with one row
        found = learn(frame, "dear", drop=["price"], **SHORT)
    assert sum(found.rows) == 119


def test_gaussian_noise_around_a_baseline_is_that_of_rows_left_out():
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 3))
    y = x @ [1.0, 2.0, 3.0] + random.normal(0, 0.5, 400)
    found = GaussianAround.fit(ridge(), x, y)
    assert found.std == pytest.approx(0.5, rel=0.1)
    low, high = found.predict_interval(x, 0.9)
    assert 0.86 < np.mean((low <= y) & (y <= high)) < 0.94
    wanted = torch.distributions.Normal(torch.from_numpy(found.predict(x)), found.std).log_prob(torch.from_numpy(y))
    assert found.log_likelihood(x, y) == pytest.approx(float(wanted.mean()))


# The model's file.


def test_a_model_in_a_file_predicts_the_same(learned, houses, tmp_path):
    learned.save(tmp_path / "m")
    again = Learned.load(tmp_path / "m")
    assert (again.schema, again.scores, again.rows) == (learned.schema, learned.scores, learned.rows)
    for a, b in zip(learning.predict(again, houses), learning.predict(learned, houses), strict=True):
        assert a == b
    pd.testing.assert_frame_equal(learning.predict(again, houses), learning.predict(learned, houses))


def test_a_file_that_asks_for_huge_networks_is_refused_before_they_are_made(learned, tmp_path):
    persistence.save(learned.estimator, tmp_path / "m")
    for change, message in (
        (lambda own: own["choice"]["candidate"].update(hidden=[10**7, 10**7]), "expected weights of the shapes"),
        (lambda own: own["x_scale"].update(std=[0.0] * len(own["x_scale"]["std"])), "must be finite and positive"),
        (lambda own: own["arguments"].update(samples=-1), "samples must be"),
        (lambda own: own.update(kind="MLPRegressor"), "kind must be one of"),
        (lambda own: own["arguments"].update(evil=1), "unexpected keyword"),
    ):
        posterior = Posterior.load(tmp_path / "m")
        change(posterior.notes["estimator"])
        posterior.save(tmp_path / "changed")
        with pytest.raises(ValueError, match=message):
            persistence.load(tmp_path / "changed")


@pytest.mark.parametrize("members", [1, 2])
def test_estimators_are_kept_with_everything(members, tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3))
    options = {**SHORT, "members": members, "random_state": np.random.RandomState(0)}
    for one in (
        BayesianMLPRegressor(**options).fit(x, x[:, :2]),
        BayesianMLPRegressor(**options).fit(x, x[:, 0]),
        BayesianMLPClassifier(**options).fit(x, np.where(x[:, 0] > 0, "a", "b")),
        BayesianMLPClassifier(**options).fit(x, (x[:, 0] > 0).astype(int)),
    ):
        persistence.save(one, tmp_path / "m", {"of": "mine"})
        again, notes = persistence.load(tmp_path / "m")
        assert notes == {"of": "mine"}
        np.testing.assert_array_equal(again.predict(x), one.predict(x))
        assert again.predict(x).dtype.kind == one.predict(x).dtype.kind
        assert again.kl_weight_ == one.kl_weight_


def test_files_that_are_no_models_are_refused(learned, tmp_path):
    path = tmp_path / "m"
    with pytest.raises(FileNotFoundError):
        Learned.load(path)
    learned.save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"rubbish" * 100, whole[:20] + b"\xff" * 20 + whole[40:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a posterior that this version can read"):
            Learned.load(path)
    q = learned.estimator.posterior_
    Posterior(q.entries, q.rest, q.likelihood).save(path)
    with pytest.raises(ValueError, match="is not a model that this version can read"):
        Learned.load(path)
    persistence.save(learned.estimator, path)
    with pytest.raises(ValueError, match="is a model, but not of a table"):
        Learned.load(path)


def test_a_model_of_another_version_is_refused(learned, tmp_path, monkeypatch):
    monkeypatch.setattr(persistence, "FORMAT_VERSION", 99)
    learned.save(tmp_path / "m")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="its format is 99, this version reads 2"):
        Learned.load(tmp_path / "m")


# The commands.


def test_a_table_in_predictions_out(houses, tmp_path, monkeypatch):
    monkeypatch.setitem(BayesianMLPRegressor.__init__.__kwdefaults__, "max_epochs", 5)
    table, model, out = (tmp_path / name for name in ("houses.csv", "new/houses.model", "out.csv"))
    houses.to_csv(table, index=False)
    found = run("fit", table, "--target", "price", "--drop", "dear", "--out", model, "--hidden", "8")
    assert found.exit_code == 0, found.output
    for word in (
        "regression of 'price'",
        "left out: 'country'",
        "ridge",
        "gradient boosting",
        "24 test rows",
        "written:",
    ):
        assert word in found.output
    found = run("predict", model, table, "--interval", "0.5", "--out", out)
    assert found.exit_code == 0, found.output
    predicted = pd.read_csv(out)
    assert list(predicted.columns[-3:]) == ["price prediction", "price lower", "price upper"]
    assert (predicted["price lower"] < predicted["price prediction"]).all()
    assert len(predicted) == 120
    wrong = tmp_path / "wrong.csv"
    houses.drop(columns="rooms").to_csv(wrong, index=False)
    before = out.read_bytes()
    found = run("predict", model, wrong, "--out", out)
    assert found.exit_code == 2
    assert "no column 'rooms'" in found.stderr
    assert out.read_bytes() == before
    found = run("predict", model, out, "--out", tmp_path / "again.csv")
    assert "has a column 'price prediction' already" in found.stderr
    found = run("fit", table, "--target", "price", "--out", model, "--quiet", "--hidden", "8")
    assert (found.exit_code, found.output) == (0, "")


def test_codes_with_zeros_in_front_stay_texts_where_they_are_categories(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("code,n\n01,1\n02,2\n")
    assert read_table(path)["code"].tolist() == [1, 2]
    assert read_table(path, texts=["code", "another"])["code"].tolist() == ["01", "02"]


def test_semicolons_tabs_and_marks_for_missing(tmp_path):
    for separator in ";\t":
        path = tmp_path / "t.csv"
        path.write_text(f"a{separator}b\n1{separator}?\n2{separator}3,5\n")
        frame = read_table(path)
        assert list(frame.columns) == ["a", "b"]
        assert frame["b"].isna().tolist() == [True, False]
        assert frame["b"][1] == 3.5


def test_an_empty_last_field_is_borne_but_a_further_one_is_not(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,price\n0,1,\n2,3,\n")
    assert read_table(path).to_numpy().tolist() == [[0, 1], [2, 3]]
    path.write_text("a,price\nid0,0,1\nid1,2,3\n")
    with pytest.raises(ValueError, match="more fields than the header"):
        read_table(path)


def test_parquet_is_read_and_written(houses, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    path.write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read_table(path)
    houses.to_parquet(path)
    pd.testing.assert_frame_equal(read_table(path), houses)
    write_table(houses, tmp_path / "u.PQ")
    pd.testing.assert_frame_equal(read_table(tmp_path / "u.PQ"), houses)


def test_without_pyarrow_the_message_says_what_to_install(houses, tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'eigenoise\[parquet\]'"):
        read_table(tmp_path / "t.parquet")


def test_what_parquet_can_hold_is_known_too(tmp_path):
    """Times with zones, exact decimals, spans of time, categories, whole numbers with gaps, yes and no."""
    pytest.importorskip("pyarrow")
    random, rows = np.random.default_rng(0), 60
    frame = pd.DataFrame(
        {
            "when": pd.date_range("2021-01-01", periods=rows, freq="7h", tz="Europe/Oslo"),
            "paid": [Decimal(f"{i}.25") for i in range(rows)],
            "took": pd.to_timedelta(random.uniform(0, 1000, rows), unit="s"),
            "kind": pd.Categorical(random.choice(["a", "b"], rows)),
            "count": pd.array([None if i % 7 == 0 else i % 5 for i in range(rows)], dtype="Int64"),
            "yes": random.choice([True, False], rows),
            "goal": [Decimal(i % 9) for i in range(rows)],
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    read = read_table(tmp_path / "t.parquet")
    schema = Schema.infer(read, "goal")
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == dict.fromkeys(("paid", "took", "count", "yes"), "number") | {"when": "date", "kind": "category"}
    assert schema.task == "regression"
    x = schema.inputs(read)
    assert x.shape == (rows, 4 + 1 + 1 + 2 + 2 + 1)
    assert np.isfinite(x).all()
    assert x[:, 4].tolist() == [float(value) for value in frame["paid"]]
    np.testing.assert_allclose(x[:, 5], frame["took"].dt.total_seconds())
    assert schema.targets(read).tolist() == [float(value) for value in frame["goal"]]


def test_spans_of_time_as_objects_are_numbers_and_equal_decimals_one_class():
    rows = 40
    spans = pd.Series([timedelta(seconds=i % 7) for i in range(rows)], dtype=object)
    frame = pd.DataFrame({"took": spans, "goal": [Decimal("1.0"), Decimal("1.00"), Decimal("2"), Decimal("2.0")] * 10})
    schema = Schema.infer(frame, "goal", task="classification")
    assert schema.columns[0].kind == "number"
    assert schema.inputs(frame)[:8, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert set(schema.targets(frame)) == {"1", "2"}


def test_lists_in_a_column_are_refused_by_its_name(houses):
    frame = houses.assign(lists=["text"] * (len(houses) - 1) + [[1, 2]])
    with pytest.raises(ValueError, match="'lists' must hold one value in each row, got a list"):
        Schema.infer(frame, "price")
    assert Schema.infer(frame, "price", drop=["lists"]).target == "price"


BAD = {
    "empty": (b"", "is empty"),
    "header": (b"a,price\n", "has a header and no rows"),
    "one row": (b"a,price\n1,2\n", "is 2 in every row"),
    "few rows": (b"a,price\n" + b"1,2\n2,3.5\n3,4\n" * 2, "at least 20 rows with a target are needed, got 6"),
    "no target": (b"a,prize\n" + b"1,2\n" * 30, "no column 'price'; did you mean 'prize'"),
    "target missing": (b"a,price\n" + b"1,\n2,\n" * 15, "'price' is missing in every row"),
    "target constant": (b"a,price\n" + b"1,2\n2,2\n" * 15, "'price' is 2 in every row"),
    "target alone": (b"price\n" + b"1\n2\n3\n" * 10, "no column besides the target"),
    "column missing": (b"a,b,price\n" + b"1,,2\n2,,3\n3,,4\n" * 10, "'b' is missing in every row: leave it out"),
    "infinity": (b"a,price\n" + b"1,2\ninf,3\n3,4\n" * 10, "'a' must hold finite numbers, got inf in row 2"),
    "infinite target": (b"a,price\n" + b"1,2\n2,-inf\n3,4\n" * 10, "'price' must hold finite numbers"),
    "latin": ("a,price\n1,2\nÄ,3\n".encode("latin-1"), "is not utf-8 text"),
    "twice": (b"a,a,price\n" + b"1,2,3\n" * 30, "two columns of the name 'a'"),
    "ragged": (b"a,price\n1,2\n1,2,3,4\n", "cannot be read as CSV"),
    "wide": (
        (",".join(f"c{i}" for i in range(10_000)) + ",price\n" + (",".join("1" * 10_000) + ",{}\n") * 30)
        .format(*range(30))
        .encode(),
        "at most 2,000 columns can be used, got 10,000",
    ),
    "constant columns": (b"a,price\n" + b"1,2\n1,3\n1,4\n" * 10, "no column is left to learn from"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_named_and_nothing_is_written(name, tmp_path):
    content, message = BAD[name]
    table, model = tmp_path / "t.csv", tmp_path / "m"
    table.write_bytes(content)
    model.write_bytes(b"an older model")
    found = run("fit", table, "--target", "price", "--out", model)
    assert found.exit_code == 2
    assert message in found.stderr
    assert model.read_bytes() == b"an older model"
    assert len(found.stderr.strip().splitlines()) == 1


def test_bad_words_on_the_command_line(houses, tmp_path):
    table = tmp_path / "t.csv"
    houses.to_csv(table, index=False)
    for more, message in (
        (("--task", "guessing"), "task must be one of"),
        (("--drop", "aera"), "no column 'aera'; did you mean 'area'"),
        (("--hidden", "many"), "--hidden: expected numbers from 1 to 10,000"),
        (("--hidden", "10000000000000"), "--hidden: expected numbers"),
        (("--out", str(table)), "--out: expected another file than"),
        (("--out", str(tmp_path)), "--out: expected a file"),
        (("--held-out", "1.5"), "held_out must be"),
        (("--method", "sgd"), "method must be one of"),
        (("--encoding", "martian"), "no encoding 'martian'"),
        (("--task", "classification"), "must have at most 60 classes in 120 rows, got 120"),
    ):
        out = () if more[0] == "--out" else ("--out", tmp_path / "m")
        found = run("fit", table, "--target", "price", *out, *more)
        assert found.exit_code == 2, found.output
        assert message in found.stderr
    assert run("fit", tmp_path / "none.csv", "--target", "a", "--out", tmp_path / "m").exit_code == 2
    assert not (tmp_path / "m").exists()


def test_labels_that_a_spreadsheet_would_run_get_an_apostrophe_in_csv_alone(tmp_path):
    rng = np.random.default_rng(0)
    a = rng.normal(size=80)
    frame = pd.DataFrame({"a": a, "=b": rng.normal(size=80), "=y": np.where(a > 0, "=1+1", "@no")})
    model = learn(frame, "=y", **SHORT)
    predicted = learning.predict(model, frame.drop(columns="=y"))
    own = [name for name in predicted.columns if name not in ("a", "=b")]
    write_table(predicted, tmp_path / "p.csv", own)
    back = pd.read_csv(tmp_path / "p.csv")
    assert list(back.columns[:2]) == ["a", "=b"]  # of the user's own table nothing changes
    assert all(name.startswith("'=y") for name in back.columns[2:])
    assert set(back["'=y prediction"]) <= {"'=1+1", "'@no"}
    write_table(predicted, tmp_path / "p.parquet", own)
    assert set(pd.read_parquet(tmp_path / "p.parquet")["=y prediction"]) <= {"=1+1", "@no"}


def test_names_cannot_command_the_terminal(tmp_path):
    path = tmp_path / "t.csv"
    evil = "y\x1b[31m\x9bm"
    pd.DataFrame({"a": range(50), evil: [1.0] * 50}).to_csv(path, index=False)
    result = CliRunner().invoke(app, ["fit", str(path), "--target", evil, "--out", str(tmp_path / "m")])
    assert result.exit_code == 2
    assert "\x1b[31m" not in result.output
    assert "\x9b" not in result.output
    assert "y\\x1b[31m" in result.output

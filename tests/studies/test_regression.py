"""The regression study's machinery: presets, runs that resume bit for bit, results that are never half-written."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from eigenoise import checks, storage
from eigenoise.cli import app
from eigenoise.cli.base import rich_table
from eigenoise.optim.methods import BAYESIAN
from eigenoise.studies import data
from eigenoise.studies.data import uci
from eigenoise.studies.recipes import PRESETS, load
from eigenoise.studies.regression import report, study
from eigenoise.studies.regression.study import Run, run_uci
from eigenoise.studies.regression.training import Training

PAPER = PRESETS["paper"]


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def boston(method="noisy-ekfac", **options):
    return Run("boston", method, PAPER, **{"splits": 2, "epochs": 3, **options})


def test_the_paper_preset_is_the_papers():
    recipe = PAPER.recipe("boston", "noisy-ekfac")
    ekfac = recipe.optimizer
    assert recipe.epochs == 1000
    assert recipe.noise["prior"] == (6.0, 6.0)
    assert (ekfac["lr"], ekfac["ema_factors"], ekfac["ema_scale"]) == (0.01, 0.001, 0.01)
    assert (ekfac["refresh_every"], ekfac["reinit_every"], ekfac["samples"]) == (5, 50, 10)
    assert (ekfac["kl_weight"], ekfac["prior_var"], ekfac["max_move"]) == (1.0, 1.0, None)
    assert PAPER.recipe("boston", "noisy-kfac").optimizer["damping_form"] == "factored"
    published = load("published")["regression"]
    assert set(published) == set(uci.SETS)
    assert all(set(row) == set(BAYESIAN) for row in published.values())
    assert published["yacht"]["noisy-ekfac"] == {"rmse": [0.974, 0.116], "ll": [-2.224, 0.007]}


@pytest.mark.parametrize("method", BAYESIAN)
def test_a_run_writes_its_result(no_cache, tmp_path, method):
    seen = []
    result = run_uci(boston(method), tmp_path, on_epoch=lambda training: seen.append(len(training.curve)))
    assert seen == [1, 2, 3]
    on_disk = json.loads((tmp_path / f"boston-{method}-paper.json").read_text())
    assert on_disk == result
    for name in ("rmse", "ll", "elbo"):
        assert len(on_disk[name]) == 2
    assert list(on_disk["coverage"])[:2] == ["0.05", "0.1"]
    assert len(on_disk["coverage"]["0.95"]) == 2
    assert on_disk["iterations"] == 3 * 46
    assert on_disk["settings"]["optimizer"]["samples"] == 10
    assert on_disk["environment"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.glob("*boston*")] == [f"boston-{method}-paper.json"]  # no checkpoint is left
    assert run_uci(boston(method), tmp_path) == result  # read, not run again


def test_a_stopped_run_continues_bit_for_bit(no_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "SAVE_SECONDS", -1.0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight = run_uci(boston(epochs=4), tmp_path / "a")

    def stop(training):
        if len(training.curve) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_uci(boston(epochs=4), tmp_path / "b", on_epoch=stop)
    assert not (tmp_path / "b" / "boston-noisy-ekfac-paper.json").exists()
    seen = []
    resumed = run_uci(boston(epochs=4), tmp_path / "b", on_epoch=lambda training: seen.append(len(training.curve)))
    assert seen == [3, 4]  # two passes were saved
    for name in ("rmse", "ll", "elbo", "curve", "iterations"):
        assert resumed[name] == straight[name]


@pytest.mark.parametrize("method", BAYESIAN)
@pytest.mark.parametrize("input_noise", [False, True])
def test_a_training_continues_bit_for_bit(method, input_noise):
    """With another process's random state, through a file."""
    recipe = dataclasses.replace(
        PRESETS["elbo"].recipe("boston", method), epochs=4, noise={}, input_noise=input_noise, test_samples=4
    )

    def training():
        splits = data.split(data.boston(), [1, 2])
        return Training(recipe, method, splits, hidden=5, batch_size=50)

    straight, first, second = training(), training(), training()
    assert list(straight.steps()) == [1, 2, 3, 4]
    for epoch in first.steps():
        if epoch == 2:
            break
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert list(second.steps()) == [3, 4]
    assert second.curve == straight.curve
    assert second.scores() == straight.scores()


def test_a_stopped_run_of_other_settings_is_kept(no_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "SAVE_SECONDS", -1.0)

    def stop(training):
        if len(training.curve) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_uci(boston("bbb", epochs=4), tmp_path, on_epoch=stop)
    path = tmp_path / ".boston-bbb-paper.checkpoint"
    kept = path.read_bytes()
    with pytest.raises(ValueError, match="stopped run of other settings"):
        run_uci(boston("bbb", epochs=1), tmp_path)
    assert path.read_bytes() == kept


def test_scores_that_are_not_finite_are_no_result(no_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Training, "scores", lambda self, on_pass: {"rmse": [1.0, 1.0], "ll": [-1.0, -math.inf], "elbo": [0.0, 0.0]}
    )
    with pytest.raises(checks.NotFiniteError, match="ll is not finite"):
        run_uci(boston("bbb", epochs=1), tmp_path)
    assert not (tmp_path / "boston-bbb-paper.json").exists()


def test_the_elbo_of_a_colder_posterior_is_that_of_weight_one():
    splits = data.split(data.boston(), [1])
    recipe = dataclasses.replace(PAPER.recipe("boston", "bbb"), epochs=1)
    cold = dataclasses.replace(recipe, optimizer={**recipe.optimizer, "kl_weight": 0.5})
    training = Training(cold, "bbb", splits, hidden=5, batch_size=100)
    list(training.steps())
    terms = training.optimizer.elbo_terms()
    expected = (terms.log_likelihood - terms.kl_weights - terms.kl_noise) / terms.num_data
    assert training.curve[-1] == pytest.approx(float(expected.mean()))
    assert float(terms.per_example.mean()) > training.curve[-1] + 0.01


def test_a_damaged_checkpoint_is_named(no_cache, tmp_path):
    path = tmp_path / ".boston-noisy-ekfac-paper.checkpoint"
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="delete it to restart this run"):
        run_uci(boston(), tmp_path)
    assert path.read_bytes() == b"damaged"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a result"),
        ("{}", "not a result"),
        ('{"format": 99}', "expected format 2, got 99"),
        ("[1]", "not a result"),
    ],
)
def test_foreign_results_are_refused_and_kept(tmp_path, content, message):
    path = tmp_path / "boston-noisy-ekfac-paper.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        boston().result(tmp_path)
    assert path.read_text() == content


def test_results_of_other_settings_are_refused(no_cache, tmp_path):
    run_uci(boston("bbb", epochs=1), tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        run_uci(boston("bbb", epochs=2), tmp_path)


def test_runs_are_checked():
    with pytest.raises(ValueError, match="did you mean 'yacht'"):
        Run("yatch", "bbb", PAPER)
    with pytest.raises(ValueError, match="method must be one of"):
        Run("yacht", "sgd", PAPER)
    canonical = dataclasses.replace(PAPER, canonical=True)
    with pytest.raises(ValueError, match="expected at most 5, the canonical ones of protein, got 6"):
        Run("protein", "bbb", canonical, splits=6).split_numbers()
    with pytest.raises(ValueError, match="one official split"):
        Run("year", "bbb", PAPER, splits=2).split_numbers()
    assert list(Run("boston", "bbb", PAPER).split_numbers()) == list(range(1, 11))
    assert list(Run("protein", "bbb", canonical).split_numbers()) == list(range(5))


def test_the_other_kind_of_splits_is_another_result():
    own, other = (Run("boston", "bbb", PRESETS["best"], canonical=kind) for kind in (True, False))
    assert own.name == "boston-bbb-best"
    assert list(own.split_numbers()) == list(range(10))
    assert other.name == "boston-bbb-best-random"
    assert list(other.split_numbers()) == list(range(1, 11))
    assert own.settings() == {**other.settings(), "canonical": True}
    assert boston("bbb", canonical=True).name == "boston-bbb-paper-canonical"


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(temporary):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.write(path, fail)
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.write_json(path, {"x": float("nan")})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    storage.write_json(path, {"x": 1})
    assert json.loads(path.read_text()) == {"x": 1}


# The commands.


def test_the_uci_command_shows_the_papers_numbers(no_cache, tmp_path):
    arguments = ["uci", "boston", "--method", "bbb,noisy-adam", "--splits", "2", "--epochs", "1", "--preset", "paper"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    for text in ("boston", "BBB", "noisy Adam", "(3.171)", "(-2.558)", "±"):
        assert text in result.stdout
    assert len(list((tmp_path / "new").glob("*.json"))) == 2
    tables = (tmp_path / "new" / "tables-paper.md").read_text()
    assert "| set | BBB | noisy Adam |" in tables
    for name in ("curves-paper", "calibration-paper"):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / "new" / f"{name}.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bostom"], "did you mean 'boston'"),
        (["boston", "--method", "adam"], "--method must be one of"),
        (["boston", "--preset", "worst"], "--preset must be one of"),
    ],
)
def test_the_uci_command_refuses_with_2(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["uci", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.stderr


def test_tables_fit_a_narrow_terminal():
    runs = []
    for method in BAYESIAN:
        settings = {"set": "kin8nm", "method": method, "preset": "paper", "splits": 2, "canonical": False}
        runs.append(
            {"settings": settings, "sample_of_the_set": False, "ll": [-2.5, -2.6], "rmse": [1.0, 1.1], "elbo": [0, 1]}
        )
    console = Console(width=80, file=io.StringIO())
    for grid in report.grids(runs)[:3]:
        console.print(rich_table(grid))
    text = console.file.getvalue()
    assert "…" not in text
    for number in ("kin8nm", "(1.111)", "(1.149)", "-2.550"):
        assert number in text


def test_a_folder_that_cannot_be_written_is_found_out_first(no_cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(study, "run_uci", lambda *a: pytest.fail("nothing may run"))
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        result = CliRunner().invoke(app, ["uci", "boston", "--preset", "paper", "--out", str(out)])
        assert result.exit_code == 2
        assert "cannot be written to" in result.stderr
    monkeypatch.setattr("tempfile.mkstemp", lambda **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(OSError, match=r"cannot be written to \(Permission denied\); choose another folder"):
        storage.folder(tmp_path / "new")


def test_a_run_that_diverges_does_not_stop_the_others(no_cache, tmp_path, monkeypatch):
    real = study.run_uci

    def diverge(run, *rest):
        if run.method == "bbb":
            raise checks.NotFiniteError("the loss is NaN")
        return real(run, *rest)

    monkeypatch.setattr(study, "run_uci", diverge)
    arguments = ["uci", "boston", "--method", "bbb,noisy-adam", "--splits", "2", "--epochs", "1", "--preset", "paper"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "boston-bbb-paper diverged: the loss is NaN" in result.stderr
    assert "boston-bbb-paper: diverged" in result.stderr
    assert "boston-bbb-paper: done" not in result.stderr
    assert "noisy Adam" in result.stdout
    alone = CliRunner().invoke(app, ["uci", "boston", "--method", "bbb", "--preset", "paper", "--out", str(tmp_path)])
    assert alone.exit_code == 1


def test_the_uci_command_can_be_quiet_and_write_for_tensorboard(no_cache, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = ["uci", "boston", "--method", "noisy-ekfac", "--splits", "2", "--epochs", "2", "--preset", "paper"]
    more = ["--out", str(tmp_path / "out"), "--quiet", "--tensorboard", str(tmp_path / "board")]
    result = CliRunner().invoke(app, [*arguments, *more])
    assert (result.exit_code, result.output) == (0, "")
    read = events.EventAccumulator(str(tmp_path / "board" / "boston-noisy-ekfac-paper"))
    read.Reload()
    assert len(read.Scalars("elbo")) == 2
    assert "log10 R/0" in read.Tags()["histograms"]


def test_bad_settings_of_a_later_run_stop_the_first(no_cache, tmp_path):
    arguments = ["uci", "boston", "protein", "--splits", "6", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "splits: expected at most 5, the canonical ones of protein, got 6" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_data_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("EIGENOISE_DATA", str(tmp_path))

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("pooch.retrieve", refuse)
    assert CliRunner().invoke(app, ["data", "path"]).stdout.strip() == str(tmp_path)
    listed = CliRunner().invoke(app, ["data", "list"])
    assert "with mlxtend" in listed.stdout
    assert uci.presence("boston") == "with mlxtend"
    assert uci.presence("yacht") == uci.presence("year") == "no"
    (tmp_path / "year_sample.npz").touch()
    assert uci.presence("year") == "a sample"
    (tmp_path / "uci" / "yacht" / "data").mkdir(parents=True)
    (tmp_path / "uci" / "yacht" / "data" / "data.txt").touch()
    assert uci.presence("yacht") == "yes"
    shutil.rmtree(tmp_path / "uci")
    (tmp_path / "year_sample.npz").unlink()
    assert "515,345" in listed.stdout
    failed = CliRunner().invoke(app, ["data", "fetch", "yacht"])
    assert failed.exit_code == 2
    assert "yacht/data/data.txt" in failed.stderr
    assert CliRunner().invoke(app, ["data", "fetch", "year"]).exit_code == 2

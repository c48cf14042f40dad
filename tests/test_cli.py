"""The command line as a person uses it."""

from __future__ import annotations

import builtins

import pytest
import torch
from typer.testing import CliRunner

from eigenoise import __version__, data, demo
from eigenoise.cli import app
from eigenoise.figures import LABELS
from eigenoise.presets import METHODS


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"eigenoise {__version__}"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Boston" in result.stdout


def test_demo_shows_a_table_and_writes_pictures(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--epochs", "2", "--splits", "2", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    for label in (LABELS[method] for method in METHODS):
        assert label in result.stdout
    for heading in ("RMSE", "log-lik", "90 %", "±"):
        assert heading in result.stdout
    for name in ("elbo.png", "predictions.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_demo_learns_and_is_reproducible():
    table = data.boston()
    settings = demo.Settings(splits=2, epochs=8)
    one, other = (demo.run("noisy-ekfac", table, settings) for _ in range(2))
    assert torch.equal(one.rmse, other.rmse)
    assert one.curve == other.curve
    assert one.curve[-1][1] > one.curve[0][1] + 1  # the bound rose
    spread = torch.tensor(table.y.std())
    assert (one.rmse < 0.7 * spread).all()
    assert one.y.shape == one.mean.shape == one.stddev.shape == (2, 51, 1)


def test_demo_says_where_it_cannot_write(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = CliRunner().invoke(app, ["demo", "--out", str(blocked)])
    assert result.exit_code == 2
    assert str(blocked) in result.stderr
    assert blocked.read_text() == "in the way"


def test_demo_says_what_is_not_installed(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_mlxtend(name, *args, **kwargs):
        if name.startswith("mlxtend"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_mlxtend)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install 'eigenoise[demo]'" in result.stderr


@pytest.mark.parametrize("arguments", [["demo", "--epochs", "0"], ["demo", "--splits", "0"], ["nonsense"]])
def test_bad_arguments_end_with_2(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2

"""The command line as a person uses it."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from eigenoise import __version__
from eigenoise.checks import NotFiniteError
from eigenoise.cli import app
from eigenoise.cli.base import console, reported, say
from eigenoise.optim.methods import BAYESIAN
from eigenoise.reporting.figures import LABELS
from eigenoise.studies import data, demo


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
    for label in (LABELS[method] for method in BAYESIAN):
        assert label in result.stdout
    for heading in ("RMSE", "log-lik", "90 %", "±"):
        assert heading in result.stdout
    for name in ("elbo.png", "predictions.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_demo_learns_and_is_reproducible():
    table = data.boston()
    one, other = (demo.run("noisy-ekfac", table, splits=2, epochs=8) for _ in range(2))
    assert one.scores == other.scores
    assert len(one.scores["rmse"]) == 2
    assert one.training.curve == other.training.curve
    assert one.training.curve[-1] > one.training.curve[0] + 0.2  # the bound rose
    assert max(one.scores["rmse"]) < 0.7 * table.y.std()
    predicted = one.training.predictive()
    assert one.training.splits.y_test.shape == predicted.mean.shape == predicted.stddev.shape == (2, 51, 1)


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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NotFiniteError("the loss is NaN"), 1, "eigenoise fit: diverged: the loss is NaN"),
        (ValueError("--out: expected a file"), 2, "eigenoise fit: --out: expected a file"),
        (OSError(28, "No space left on device"), 2, "eigenoise fit: [Errno 28] No space left on device"),
        (KeyboardInterrupt(), 130, "eigenoise fit: stopped; nothing was written"),
    ],
)
def test_errors_become_messages_and_exit_codes(error, code, said, capsys):
    with pytest.raises(typer.Exit) as left, reported("fit", "nothing was written"):
        raise error
    assert left.value.exit_code == code
    assert capsys.readouterr() == ("", f"{said}\n")


def test_a_fault_of_ours_is_no_users_error():
    with pytest.raises(KeyError), reported("fit"):
        raise KeyError("x")
    with pytest.raises(typer.Exit) as left, reported("fit"):
        raise typer.Exit(3)
    assert left.value.exit_code == 3


def test_a_demo_that_diverges_says_so(tmp_path, monkeypatch):
    def diverge(*_, **__):
        raise NotFiniteError("the loss is NaN")

    monkeypatch.setattr("eigenoise.studies.demo.run", diverge)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "eigenoise demo: diverged: the loss is NaN" in result.stderr


def test_brackets_in_a_path_are_no_markup(capsys):
    say(console(), "written: results[bold]x/[/a].json")
    assert capsys.readouterr().out == "written: results[bold]x/[/a].json\n"


def test_every_command_shows_an_example():
    for words in (["demo"], ["uci"], ["cifar10"], ["bench"], ["fit"], ["predict"], ["report"], ["data", "fetch"]):
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0
        assert "Example: eigenoise " + " ".join(words) in " ".join(result.stdout.split())


WAITS = """
from eigenoise.cli import app, base
import time

@app.command()
def wait():
    with base.reported("wait", "nothing was written"):
        print("ready", flush=True)
        time.sleep(60)

app(["wait"])
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are posix")
def test_being_asked_to_end_before_training_gives_a_message():
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "eigenoise wait: stopped; nothing was written\n"

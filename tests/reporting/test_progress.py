"""Seeing a run: lines now and then, bars in a terminal, nothing when quiet, and what TensorBoard reads."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn

import eigenoise as en
from eigenoise.reporting.progress import Lines, duration, watching
from eigenoise.reporting.tensorboard import Board


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_lines_come_every_ten_seconds_and_at_the_end():
    said, clock = [], Clock()
    task = Lines(said.append, clock).task("boston", total=100)
    for done in range(1, 51):
        clock.now += 0.5
        task.to(done, f"loss {done}")
    task.end()
    assert said == [
        "boston: 20%, loss 20, 40 s left",
        "boston: 40%, loss 40, 30 s left",
        "boston: done, loss 50, 25 s",
    ]


def test_a_resumed_task_knows_its_own_speed():
    said, clock = [], Clock()
    task = Lines(said.append, clock).task("run", total=100)
    task.to(80)
    for done in (81, 82):
        clock.now += 10
        task.to(done)
    assert said[-1] == "run: 82%, 3:00 min left"


def test_a_task_of_unknown_length_and_one_that_learns_it():
    said, clock = [], Clock()
    task = Lines(said.append, clock).task("run")
    clock.now = 11
    task.to(1, "ELBO -1.2")
    clock.now = 22
    task.to(2, "ELBO -1.1", total=4)
    assert said == ["run: ELBO -1.2", "run: 50%, ELBO -1.1, 22 s left"]


def test_durations_read_well():
    assert [duration(s) for s in (0.4, 59.4, 59.6, 185, 7500)] == ["0 s", "59 s", "1:00 min", "3:05 min", "2:05 h"]


def test_without_a_terminal_there_are_lines_on_stderr_only(capsys):
    with watching() as seen:
        task = seen.task("run", 2)
        task.to(2, "loss 1")
        task.end()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "run: done, loss 1, 0 s\n")


def test_quiet_is_quiet(capsys):
    with watching(False) as seen:
        task = seen.task("run", 2)
        task.to(2, "loss 1")
        task.end()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_bars_with_the_time_left(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with watching() as seen:
        task = seen.task("noisy [EK]-FAC", 4)  # no markup
        task.to(1, "loss 0.5")
        seen.task("another", 2).to(1)
        task.end()
    text = screen.getvalue()
    assert "\x1b[" in text
    assert "left" in text
    assert "another" in text
    assert "noisy [EK]-FAC: done, loss 0.5, 0 s" in text


def test_colours_that_are_forced_make_no_terminal_of_a_file(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with watching() as seen:
        seen.task("run", 2).end("diverged")
    assert capsys.readouterr().err == "run: diverged, 0 s\n"


def test_more_than_all_is_all():
    said, clock = [], Clock()
    task = Lines(said.append, clock).task("run", total=3)
    for done in range(5):
        clock.now += 11
        task.to(done)
    assert said[-1] == "run: 100%"


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC, en.BayesByBackprop])
def test_tensorboard_reads_scalars_and_histograms(tmp_path, method):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    likelihood = en.GaussianLikelihood()
    opt = method(model, num_data=20, likelihood=likelihood)
    for _ in range(3):
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(torch.randn(20, 3)), torch.randn(20, 1)).backward()
        opt.step()
    with Board(tmp_path) as board:
        for step in (1, 2):
            board.scalars(step, loss=0.5 / step, right=0.25)
            board.histograms(step, opt)
        board.histograms(3, torch.optim.SGD(model.parameters()))  # it has no posterior
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.value for event in found.Scalars("loss")] == [0.5, 0.25]
    names = set(found.Tags()["histograms"])
    assert {"mean/0", "mean/2", "stddev/0", "stddev/2"} <= names
    assert ("log10 R/0" in names) == (method is en.NoisyEKFAC)
    spread = found.Histograms("stddev/0")[-1].histogram_value
    truth = opt.posterior["0"].stddev
    assert spread.num == truth.numel()
    assert spread.max == pytest.approx(float(truth.max()), rel=1e-5)


def test_without_tensorboard_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'eigenoise\[tensorboard\]'"):
        Board(tmp_path)

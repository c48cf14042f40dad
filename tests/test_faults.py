"""Faults that are made to happen: numbers that overflow, folders that refuse, processes that are killed.

Others are beside what they harm: decompositions that fail in test_linalg and test_distributed, bad batches in
test_optim and test_distributed, damaged checkpoints, full disks and clocks in test_checkpoints, damaged files of all
kinds in test_fuzz.
"""

from __future__ import annotations

import copy
import ctypes
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import eigenoise as en
import processes

FISHERS = {
    "NoisyEKFAC": en.NoisyEKFAC,
    "NoisyKFAC": en.NoisyKFAC,
    "NoisyAdam": en.NoisyAdam,
    "EKFAC": en.EKFAC,
    "KFAC": en.KFAC,
}
forks = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: here there is none that matters


def bits(tree):
    """Every number of nested dicts as bytes, by name."""
    if isinstance(tree, dict):
        return {f"{key}.{name}": value for key, part in tree.items() for name, value in bits(part).items()}
    if isinstance(tree, torch.Tensor):
        return {"": tree.detach().numpy().tobytes()}
    return {"": repr(tree)}


def classifier(method, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).float()
    opt = FISHERS[method](model, num_data=100, likelihood=en.CategoricalLikelihood(), stats_every=2, **options)
    return model, opt


def step(model, opt, x):
    y = torch.arange(len(x)) % 3
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y).backward()
    opt.step()


@pytest.mark.parametrize("method", FISHERS)
def test_statistics_that_overflow_leave_everything_as_it_was(method):
    model, opt = classifier(method)
    good = torch.randn(6, 4, dtype=torch.float32)
    for _ in range(2):
        step(model, opt, good)
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    with pytest.raises(FloatingPointError, match="a statistic or the step is NaN or infinite at step 2"):
        step(model, opt, good * 1e25)  # the loss and its gradient are numbers; squares of inputs are not
    for was, found in zip(before, (model.state_dict(), opt.state_dict()), strict=True):
        was, found = bits(was), bits(found)
        changed = {name for name in was if was[name] != found[name]}
        noise = ("generator", "deviation", "waiting")  # was drawn for it, or is waiting to be used again
        assert all(any(word in name for word in noise) for name in changed), changed
    for _ in range(5):
        step(model, opt, good)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("method", FISHERS)
def test_statistics_that_overflow_can_be_skipped(method):
    model, opt = classifier(method, not_finite="skip")
    good = torch.randn(6, 4, dtype=torch.float32)
    step(model, opt, good)
    step(model, opt, good)
    with pytest.warns(RuntimeWarning, match="a statistic or the step is NaN or infinite.*the step is skipped"):
        step(model, opt, good * 1e25)
    step(model, opt, good)
    assert (opt.steps, opt.skipped) == (3, 1)
    assert all(p.isfinite().all() for p in model.parameters())


def _overflow_only_together():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 3)).float())
    opt = en.NoisyEKFAC(model, num_data=100, likelihood=en.CategoricalLikelihood(), stats_every=2, refresh_every=2)
    good = torch.randn(2, 1, dtype=torch.float32)
    step(model, opt, good)
    step(model, opt, good)
    before = bits(opt.model.state_dict())
    most = torch.finfo(torch.float32).max
    large = torch.tensor([[(0.7 * most) ** 0.5]], dtype=torch.float32)  # its square is a number, twice that is none
    assert large.square().isfinite().all()
    with pytest.raises(FloatingPointError, match="a statistic or the step is NaN or infinite at step 2"):
        step(model, opt, large)
    assert bits(opt.model.state_dict()) == before
    for _ in range(3):
        step(model, opt, good)
    return bits(opt.model.state_dict())


@forks
def test_statistics_that_overflow_only_in_the_sum_over_processes_stop_the_step_on_all():
    first, second = processes.run(2, _overflow_only_together)
    assert first == second


def _obey_permissions():
    """Have the process to come heed what a folder forbids, though root may do everything."""
    if os.geteuid() == 0:
        drop, override = 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
        assert ctypes.CDLL(None).prctl(drop, override, 0, 0, 0) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked to hold root to permissions")
@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--out", "{}"],
        ["uci", "boston", "--method", "noisy-ekfac", "--out", "{}/new"],
        ["cifar10", "--out", "{}", "--steps", "1"],
        ["fit", "{table}", "--target", "y", "--out", "{}/model"],
    ],
    ids=lambda command: command[0],
)
def test_a_read_only_folder_is_said_before_any_work_is_done(tmp_path, command):
    table = tmp_path / "table.csv"
    table.write_text("x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(40)))
    folder = tmp_path / "read only"
    folder.mkdir()
    folder.chmod(0o555)
    words = [word.format(folder, table=table) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "eigenoise", *words],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=_obey_permissions,
    )
    folder.chmod(0o755)
    assert done.returncode not in (0, -9), done.stdout
    assert re.search(r"read only.*cannot be written to \(Permission denied\)", done.stderr.replace("\n", " "))
    assert "Traceback" not in done.stderr
    assert not list(folder.iterdir())

"""The classification study on tiny made-up images: training, batch norm, scores, resuming, tables, bad input."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import eigenoise as en
import processes
from eigenoise.cli import app
from eigenoise.inference.batch_norm import settle_batch_norm
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies.checkpoints import read, stop_requests
from eigenoise.studies.classification import report, study
from eigenoise.studies.classification.evaluation import (
    EvaluationSets,
    corrupted_images,
    entropy,
    evaluate,
    probabilities,
    scores,
)
from eigenoise.studies.classification.point import PointSGD
from eigenoise.studies.classification.study import Run, run_cifar10
from eigenoise.studies.classification.training import METHODS, Training
from eigenoise.studies.data import Images, images
from eigenoise.studies.recipes import SETTINGS, Setting, classification_recipe

COUNT = 60  # images in each of the six files
PLAIN, BOTH = Setting(False, False), Setting(True, True)


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A data cache with files of the official layout, small and easy to learn: a class is a brightness."""
    monkeypatch.setattr(images, "RECORDS", COUNT)
    monkeypatch.setattr(study, "VALIDATION_SIZE", 50)
    home = tmp_path / "cache" / images.CIFAR10_FOLDER
    home.mkdir(parents=True)
    random = np.random.default_rng(0)
    known = {}
    for name in images.CIFAR10_FILES:
        raw = random.integers(0, 40, (COUNT, images.RECORD))
        raw[:, 0] = random.permutation(COUNT) % 10
        raw[:, 1:] += 20 * raw[:, :1]
        content = raw.astype(np.uint8).tobytes()
        (home / name).write_bytes(content)
        known[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(images, "CIFAR10_FILES", known)
    return home.parent


@pytest.fixture
def hears():
    """Interrupts are heard as in a terminal, even if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def some_images(count=80):
    y = torch.arange(count) % 10
    x = (20 * y[:, None, None, None] + torch.randint(40, (count, 3, 32, 32))).to(torch.uint8)
    return Images(x, y)


def training(method="noisy-ekfac", setting=PLAIN, *, steps=6, seed=0, **options):
    torch.manual_seed(seed)
    model = en.models.VGG11(width=1 / 32, batch_norm=setting.batch_norm)
    options = {**classification_recipe(method, setting), **options}
    return Training(
        model,
        some_images(),
        method,
        options,
        total_steps=steps,
        batch_size=16,
        augmented=setting.augmented,
        seed=seed,
    )


def run(method="noisy-ekfac", setting=PLAIN, **more):
    options = {"steps": 4, "train_size": 100, "batch_size": 16, "samples": 2, "width": 1 / 32, **more}
    return Run(method, setting, **options)


# Batch norm.


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 2))


def test_settled_averages_are_those_of_the_batches_with_the_weights_of_now():
    model = normed()
    model[1].momentum = 0.3
    batches = [torch.randn(50, 3) + i for i in range(3)]
    model.eval()
    settle_batch_norm(model, batches)
    outputs = [model[0](x) for x in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([f.mean(0) for f in outputs]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([f.var(0) for f in outputs]).mean(0))
    assert not any(module.training for module in model.modules())
    assert model[1].momentum == 0.3
    settled = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="batches must hold at least one"):
        settle_batch_norm(model, [])
    with pytest.raises(RuntimeError):
        settle_batch_norm(model, [torch.randn(50, 3), torch.randn(50, 4)])
    assert model[1].momentum == 0.3
    assert torch.equal(model[1].running_mean, settled)


def test_settling_without_batch_norm_runs_nothing():
    settle_batch_norm(nn.Sequential(nn.Linear(3, 2)), iter([object()]))


def test_each_weight_sample_has_batch_norm_of_its_own_and_all_is_put_back():
    one = training(setting=Setting(False, True), kl_weight=1.0)
    list(one.steps())
    before = {name: buffer.clone() for name, buffer in one.model.named_buffers()}
    weights = [p.detach().clone() for p in one.model.parameters()]
    seen = []
    first = next(m for m in one.model.modules() if isinstance(m, nn.BatchNorm2d))
    handle = first.register_forward_pre_hook(
        lambda module, args: None if module.training else seen.append(module.running_var.clone())
    )
    found = probabilities(one, {"test": some_images().x}, samples=3)
    handle.remove()
    assert set(found) == {"mean", "samples"}
    assert len(seen) == 4
    assert len({tuple(v.tolist()) for v in seen}) == 4
    for name, buffer in one.model.named_buffers():
        assert torch.equal(buffer, before[name])
    for p, old in zip(one.model.parameters(), weights, strict=True):
        assert torch.equal(p.detach(), old)


def test_averages_gathered_in_training_would_be_off():
    one = training(setting=Setting(False, True), steps=10, kl_weight=1.0)
    list(one.steps())
    norm = next(m for m in one.model.modules() if isinstance(m, nn.BatchNorm2d))
    gathered = norm.running_var.clone()
    settle_batch_norm(one.model, one.batches(4))
    assert (norm.running_var / gathered - 1).abs().max() > 0.05


# Training.


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method):
    one = training(method, Setting(False, True), steps=40, kl_weight=0.01, **({"lr": 0.01} if method == "bbb" else {}))
    assert list(one.steps()) == list(range(1, 41))
    losses = [loss for loss, _ in one.curve]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    assert one.epochs == 8.0
    noise = torch.randint(256, (30, 3, 32, 32), dtype=torch.uint8)
    found = evaluate(one, EvaluationSets(some_images(), {"noise": noise}, samples=2))
    assert ("samples" in found) == (method in ("bbb", "noisy-adam", "noisy-kfac", "noisy-ekfac"))
    for way in found.values():
        assert 0 <= way["ece"] <= 1
        assert 0 <= way["auroc"]["noise"] <= 1
        assert way["nll"] > 0


def test_a_pass_sees_every_image_once_and_leftovers_come_in_the_next():
    one = training()
    one.images = one.images.some(slice(40))
    rows = torch.cat([one._rows() for _ in range(5)])
    assert sorted(rows[:40].tolist()) == list(range(40))
    assert sorted(rows[40:].tolist()) == list(range(40))
    assert rows[:40].tolist() != rows[40:].tolist()


def test_the_step_size_falls_to_zero():
    one = training("sgd", steps=4, lr=0.1)
    rates = [one.optimizer.param_groups[0]["lr"] for _ in one.steps()]
    np.testing.assert_allclose(rates, 0.05 * (1 + np.cos(np.pi * np.arange(4) / 4)))


def test_sgd_is_on_the_log_posterior_of_the_same_prior():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    likelihood = en.CategoricalLikelihood()
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    opt = PointSGD(model, num_data=20, likelihood=likelihood, lr=0.1, kl_weight=0.5, prior_var=0.2, momentum=0.0)
    before = model.weight.detach().clone()
    with opt.sampled_params():
        likelihood.nll(model(x), y).backward()
    slope = model.weight.grad.clone()
    opt.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * (slope + 0.5 / (20 * 0.2) * before))


@pytest.mark.parametrize("method", ["sgd", "noisy-ekfac", "bbb"])
def test_a_training_that_is_resumed_is_the_same_bit_for_bit(method):
    whole, first, second = (training(method, BOTH) for _ in range(3))
    list(whole.steps())
    for done in first.steps():
        if done == 3:
            break
    second.load_state_dict(first.state_dict())
    list(second.steps())
    assert second.curve == whole.curve
    for a, b in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_training_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="batch_size: expected at most the number of images, 80, got 81"):
        Training(nn.Flatten(), some_images(), "sgd", {}, total_steps=1, batch_size=81, augmented=False)
    with pytest.raises(ValueError, match="batch_size must be at least 2"):
        Training(nn.Flatten(), some_images(), "sgd", {}, total_steps=1, batch_size=1, augmented=False)
    with pytest.raises(ValueError, match="method must be one of"):
        Training(nn.Flatten(), some_images(), "adam", {}, total_steps=1, batch_size=2, augmented=False)


def test_a_loss_that_is_not_finite_stops_before_the_weights_move():
    one = training("sgd", lr=1e30)
    with pytest.raises(en.checks.NotFiniteError, match=r"the loss is (nan|inf) at step \d+: try a smaller lr"):
        list(one.steps())
    assert all(torch.isfinite(p).all() for p in one.model.parameters()) or len(one.curve) > 0


# Scores.


def test_scores_of_certain_and_of_blind_predictions():
    y = torch.arange(20) % 10
    sure = scores(nn.functional.one_hot(y, 10).double(), y)
    assert (sure["accuracy"], sure["nll"], sure["brier"], sure["ece"]) == (1.0, 0.0, 0.0, 0.0)
    blind = scores(torch.full((20, 10), 0.1, dtype=torch.float64), y)
    assert blind["nll"] == pytest.approx(np.log(10))
    assert blind["accuracy"] == pytest.approx(0.1)
    assert blind["ece"] == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(entropy(torch.full((2, 10), 0.1)), torch.full((2,), float(np.log(10))))
    assert entropy(torch.eye(3)).tolist() == [0.0, 0.0, 0.0]


def test_corrupted_images_keep_their_labels(cache):
    test = some_images(12)
    found = corrupted_images(test, 4)
    assert len(found) == 15
    assert all(torch.equal(part.y, test.y[:4]) for part in found.values())
    assert not torch.equal(found["noise 5"].x, test.x[:4])


# A run.


def test_corrupted_images_are_scored_in_a_table(cache, tmp_path):
    found = run_cifar10(run("noisy-kfac", corrupted=5), tmp_path, cache)
    own = found["scores"]["samples"]["corrupted"]
    assert set(own["contrast 2"]) == {"accuracy", "nll", "brier", "ece"}
    grid = report.grids([found])[-1]
    assert grid.title.startswith("Corrupted images")
    wanted = np.mean([own[f"{kind} 3"]["accuracy"] for kind in ("noise", "blur", "contrast")])
    assert grid.rows[0][3].startswith(f"{100 * wanted:.1f} /")


def test_a_run_writes_its_result_and_is_not_done_twice(cache, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    steps, passes = [], []
    result = run_cifar10(
        run(), out, cache, on_step=lambda t: steps.append(len(t.curve)), on_pass=lambda: passes.append(1)
    )
    assert steps == [1, 2, 3, 4]
    assert len(passes) == 3
    assert result["settings"]["options"]["refresh_every"] == 200
    assert set(result["scores"]) == {"mean", "samples"}
    assert len(result["curve"]) == 4
    path = out / "noisy-ekfac-plain-0.json"
    assert json.loads(path.read_text()) == result
    assert [p.name for p in out.iterdir()] == [path.name]
    assert run_cifar10(run(), out, cache / "nowhere") == result
    with pytest.raises(ValueError, match="is the result of other settings"):
        run_cifar10(run(steps=5), out, cache)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not a result that this version can read"):
        run_cifar10(run(), out, cache)


@pytest.mark.parametrize("kind", ["term", "interrupt"])
def test_a_stopped_run_goes_on_when_asked_to(cache, tmp_path, hears, kind):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    wanted = run_cifar10(run(setting=BOTH), whole, cache)

    def stop(t):
        if len(t.curve) == 2:
            signal.raise_signal(signal.SIGTERM if kind == "term" else signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_cifar10(run(setting=BOTH), halves, cache, on_step=stop)
    with pytest.raises(ValueError, match="is a stopped run: continue it with --resume"):
        run_cifar10(run(setting=BOTH), halves, cache)
    with pytest.raises(ValueError, match="a stopped run of other settings"):
        run_cifar10(run(setting=BOTH, steps=6), halves, cache, resume=True)
    found = run_cifar10(run(setting=BOTH), halves, cache, resume=True)
    assert found["curve"] == wanted["curve"]
    assert found["scores"] == wanted["scores"]
    assert [p.name for p in halves.iterdir()] == ["noisy-ekfac-D+B-0.json"]


def test_an_interrupt_waits_for_the_end_of_a_step_but_a_second_does_not(cache, tmp_path, hears, monkeypatch):
    steps = []
    whole = Training._step

    def interrupted(self):
        if len(self.curve) == 1:
            signal.raise_signal(signal.SIGINT)
            if steps:
                signal.raise_signal(signal.SIGINT)
        return whole(self)

    monkeypatch.setattr(Training, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cifar10(run(), tmp_path, cache, on_step=lambda t: None)
    checkpoint = tmp_path / ".noisy-ekfac-plain-0.checkpoint"
    assert len(read(checkpoint)["state"]["curve"]) == 2
    checkpoint.unlink()
    steps.append(1)
    with pytest.raises(KeyboardInterrupt):
        run_cifar10(run(), tmp_path, cache)
    assert not checkpoint.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_ignored(hears):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_requests() as requests:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert requests == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_results_that_do_not_compare_are_not_put_into_one_table(tmp_path):
    def settings(**more):
        return {"settings": {**run(**more).settings()}}

    report.check_comparable([settings(), settings(seed=1), settings(method="sgd", setting=BOTH)], "here")
    with pytest.raises(ValueError, match="results in here differ in steps, width: choose another folder"):
        report.check_comparable([settings(), settings(seed=1, steps=9, width=0.1)], "here")
    with pytest.raises(ValueError, match="of one method and setting differ in options"):
        report.check_comparable([settings(), settings(seed=1, options={"lr": 1.0})], "here")


def test_a_damaged_checkpoint_is_left_alone(cache, tmp_path):
    checkpoint = tmp_path / ".sgd-plain-0.checkpoint"
    checkpoint.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"is no checkpoint of this version; delete it to restart this run"):
        run_cifar10(run("sgd"), tmp_path, cache, resume=True)
    assert checkpoint.read_bytes() == b"rubbish"


def test_validation_never_sees_the_test_set_or_its_own_images(cache):
    train, held_out = study.load_images(run(validate=True, train_size=250), cache)
    everything, test = images.cifar10(cache)
    rows = {image.numpy().tobytes() for image in everything.x}
    ours, theirs = ({image.numpy().tobytes() for image in part.x} for part in (train, held_out))
    assert len(held_out) == 50
    assert ours <= rows
    assert theirs <= rows
    assert not ours & theirs
    assert not theirs & {image.numpy().tobytes() for image in test.x}
    smaller, real = study.load_images(run(train_size=70), cache)
    assert torch.equal(smaller.x, train.x[:70])
    assert torch.equal(real.x, test.x)


def test_a_class_that_never_occurs_is_named(cache):
    with pytest.warns(
        UserWarning, match=r"no training image shows (airplane|automobile|bird|cat|deer).*larger train_size"
    ):
        study.load_images(run(train_size=4, batch_size=4), cache)


def test_runs_that_cannot_be_are_refused(cache, tmp_path):
    for bad, message in (
        ({"method": "adam"}, "method must be one of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"train_size": 50_001}, "train_size: expected at most 50,000, got 50,001"),
        ({"train_size": 10}, "batch_size: expected at most train_size, 10, got 16"),
        ({"width": 0.0}, "width must be"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(**bad)
    with pytest.raises(ValueError, match=r"device: expected one of cpu, got 'cuda:7'"):
        run_cifar10(run(), tmp_path, cache, device="cuda:7")
    with pytest.raises(ValueError, match="device: expected one of cpu, got 'toaster'"):
        run_cifar10(run(), tmp_path, cache, device="toaster")
    with pytest.raises(ValueError, match="device: expected one of cpu, got 'meta'"):
        run_cifar10(run(), tmp_path, cache, device="meta")
    assert not list(tmp_path.glob("*.json"))


# Tables and the command.


def result(method, setting, seed, accuracy, ways=("mean",)):
    bins = {key: [0.5, 0.5] for key in ("weight", "confidence", "accuracy")}
    own = {"accuracy": accuracy, "nll": 1.0, "brier": 0.5, "ece": 0.1, "reliability": bins, "auroc": {"svhn": 0.8}}
    return {
        "format": Run.FORMAT,
        "settings": {"method": method, "setting": setting, "seed": seed, "validate": False},
        "scores": {way: {**own, "accuracy": accuracy + 0.01 * (way == "samples")} for way in ways},
        "curve": [[2.0, 0.1]] * 45,
    }


def test_tables_stand_beside_the_papers(tmp_path):
    both = ("mean", "samples")
    results = [
        result("sgd", "plain", 0, 0.50),
        result("sgd", "plain", 1, 0.52),
        result("noisy-ekfac", "plain", 0, 0.60, both),
        result("noisy-ekfac", "D+B", 0, 0.70, both),
    ]
    for i, one in enumerate(results):
        (tmp_path / f"{i}.json").write_text(json.dumps(one))
    (tmp_path / "other.json").write_text("[]")
    grid, *others = report.grids(report.collect(tmp_path))
    assert grid.header == ["method", "plain", "D+B"]
    assert "on test images" in grid.title
    assert grid.rows == [
        ["SGD", "51.00 ± 1.00 (81.79)", "–"],
        ["noisy EK-FAC", "61.00 (87.07)", "71.00 (92.22)"],
        ["noisy EK-FAC, mean alone", "60.00", "70.00"],
    ]
    assert grid.bold == {(1, 1), (1, 2)}
    assert [g.title.split(",")[0].split(" (")[0] for g in others] == [
        "Negative log-likelihood of an image",
        "Brier score",
        "Expected calibration error in per cent",
        "How well entropy tells svhn from CIFAR-10",
        "Accuracy in per cent: difference to noisy EK-FAC at the same seed",
        "Negative log-likelihood of an image: difference to noisy EK-FAC at the same seed",
        "Expected calibration error in per cent: difference to noisy EK-FAC at the same seed",
    ]
    assert others[4].rows == [["SGD", "-11.00", "–"]]  # the seed that both have
    paths = report.write(tmp_path)
    assert {path.name for path in paths} >= {"tables.md", "curves.png", "reliability.svg"}
    assert all(path.stat().st_size > 100 for path in paths)


def test_settings_have_the_papers_names():
    assert [setting.name for setting in SETTINGS] == ["plain", "D", "B", "D+B"]


def test_the_scale_of_the_posterior_does_not_depend_on_the_number_of_images():
    few, many, all_of_them = (
        classification_recipe("noisy-ekfac", PLAIN, size)["kl_weight"] / size for size in (5_000, 20_000, 10**6)
    )
    assert few == pytest.approx(many)
    assert all_of_them == 1e-6  # λ is at most 1
    assert classification_recipe("bbb", PLAIN)["kl_weight"] == classification_recipe("noisy-ekfac", PLAIN)["kl_weight"]


def test_a_run_tells_images_of_other_sets_from_its_own(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "is_here", lambda name, folder: name == "svhn")
    monkeypatch.setattr(images, "other", lambda name, folder: torch.randint(256, (30, 3, 32, 32)).to(torch.uint8))
    monkeypatch.setattr(study, "OOD_SIZE", 7)
    seen = []
    monkeypatch.setattr(
        "eigenoise.studies.classification.training.evaluate",
        lambda training, sets, on_pass: seen.append(sets.ood) or {"mean": {}},
    )
    run_cifar10(run("sgd"), tmp_path, cache)
    assert {name: len(x) for name, x in seen[0].items()} == {"svhn": 7}


def command(cache, out, *more):
    small = ["--steps", "3", "--train-size", "64", "--batch-size", "16", "--samples", "1", "--width", "0.03"]
    return CliRunner().invoke(app, ["cifar10", *small, "--data", str(cache), "--out", str(out), *more])


def test_the_command_trains_shows_tables_and_writes_files(cache, tmp_path):
    out = tmp_path / "new" / "out"
    found = command(cache, out, "--method", "sgd,noisy-kfac", "--no-aug", "--bn")
    assert found.exit_code == 0, found.output
    for word in ("SGD", "noisy K-FAC", "85.75", "calibration", "written:"):
        assert word in found.stdout
    assert {path.name for path in out.iterdir()} == {
        "sgd-B-0.json",
        "noisy-kfac-B-0.json",
        "tables.md",
        "curves.png",
        "curves.svg",
        "reliability.png",
        "reliability.svg",
    }


def test_the_command_can_be_quiet_and_write_for_tensorboard(cache, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = tmp_path / "board"
    found = command(cache, tmp_path / "out", "--method", "sgd,noisy-ekfac", "--quiet", "--tensorboard", str(board))
    assert found.exit_code == 0, found.output
    assert found.output == ""
    for name in ("sgd-D+B-0", "noisy-ekfac-D+B-0"):
        read = events.EventAccumulator(str(board / name))
        read.Reload()
        curve = json.loads((tmp_path / "out" / f"{name}.json").read_text())["curve"]
        assert [event.value for event in read.Scalars("loss")] == pytest.approx([loss for loss, _ in curve])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "adam"], "--method must be one of"),
        (["--epochs", "1"], "expected --steps or --epochs, got both"),
        (["--device", "cuda:9"], "device: expected one of cpu, got 'cuda:9'"),
        (["--batch-size", "65"], "batch_size: expected at most train_size"),
        (["--data", "/nowhere"], "could not be downloaded"),
    ],
)
def test_the_command_says_what_is_wrong(cache, tmp_path, monkeypatch, more, message):
    monkeypatch.setattr(images, "CIFAR10_URL", "http://127.0.0.1:9/none.tar.gz")
    found = command(cache, tmp_path / "out", *more)
    assert found.exit_code == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def _in_two_processes(cache, out, stop, resume=False):
    def on_step(training):
        if len(training.curve) == stop and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    ranks = Ranks(dist.group.WORLD)
    try:
        return run_cifar10(run(setting=BOTH, steps=5), out, cache, resume=resume, ranks=ranks, on_step=on_step)
    except KeyboardInterrupt:
        return "stopped"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: here there is none that matters
def test_several_processes_stop_together_and_go_on_bit_for_bit(cache, tmp_path, hears):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    wanted, nothing = processes.run(2, _in_two_processes, cache, whole, None)
    assert nothing is None
    assert wanted["processes"] == 2
    assert processes.run(2, _in_two_processes, cache, halves, 2) == ["stopped", "stopped"]
    assert len(read(halves / ".noisy-ekfac-D+B-0.checkpoint")["state"]["curve"]) == 2
    with pytest.raises(ValueError, match="stopped run of other settings"):  # one process alone would go another way
        run_cifar10(run(setting=BOTH, steps=5), halves, cache, resume=True)
    found, _ = processes.run(2, _in_two_processes, cache, halves, None, True)
    assert found["digest"] == wanted["digest"]
    assert found["scores"] == wanted["scores"]
    assert [path.name for path in halves.iterdir()] == ["noisy-ekfac-D+B-0.json"]
    alone = run_cifar10(run(setting=BOTH, steps=5), tmp_path, cache)
    assert wanted["epochs"] == 2 * alone["epochs"]
    assert found["digest"] != alone["digest"]


def _one_is_killed(cache, out):
    Run.SAVE_STEPS = 2

    def on_step(training):
        if len(training.curve) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError):  # what it says is tested where processes meet
        run_cifar10(run(setting=BOTH, steps=5), out, cache, ranks=Ranks(dist.group.WORLD), on_step=on_step)
    return "told"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_one_process_was_killed_all_go_on_from_the_last_checkpoint(cache, tmp_path, hears):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    wanted, _ = processes.run(2, _in_two_processes, cache, whole, None)
    assert processes.run(2, _one_is_killed, cache, broken, may_die=True) == ["told", None]
    assert len(read(broken / ".noisy-ekfac-D+B-0.checkpoint")["state"]["curve"]) == 2
    found, _ = processes.run(2, _in_two_processes, cache, broken, None, True)
    assert found["digest"] == wanted["digest"]
    assert found["scores"] == wanted["scores"]

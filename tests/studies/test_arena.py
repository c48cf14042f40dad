"""The arena: every method trains and predicts, budgets are kept, results are resumed."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from torch import nn

from eigenoise import models
from eigenoise.studies.arena import learners, run, show, tasks
from eigenoise.studies.arena.tasks import Parts, Task


def parts(classes, seed=0):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(160, 4, generator=chance)
    y = (
        (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        if classes
        else x[:, :1] + 0.1 * torch.randn(160, 1, generator=chance)
    )
    return Parts(x[:100], y[:100], x[100:130], y[100:130], x[130:], y[130:], x[130:] * 10)


def small(classes):
    network = lambda: models.MLP(4, [8], 3 if classes else 1)  # noqa: E731
    return Task("small", "reporting", lambda seed: parts(classes, seed), network, 0.05, classes=classes, batch_size=32)


@pytest.fixture
def only(monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", {"classes": small(True), "numbers": small(False)})
    monkeypatch.setattr(show, "TASKS", tasks.TASKS)


@pytest.mark.filterwarnings("ignore")  # of the libraries compared with
@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("name", learners.METHODS)
def test_every_method_trains_and_predicts(name, classes):
    library = {"ivon": "ivon", "laplace": "laplace", "laplace-all": "laplace"}.get(name)
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    method, task, rows = learners.METHODS[name], small(classes), parts(classes)
    setting = (learners.METHODS[method.settings_of] if method.settings_of else method).settings[-1]
    learner, how = run.train(method, setting, task, rows, 0.3, seed=0)
    if method.finish is not None:
        learner = method.finish(learner, task, rows)
    found = run.scores(learner.predict(rows.x_test), rows.y_test, learner.predict(rows.x_other) if classes else None)
    assert how["steps"] > 3
    assert 0.3 <= how["seconds"] < 3
    assert all(value == value for value in found.values())
    assert found["ll"] > -3
    assert set(found) == (
        {"ll", "accuracy", "calibration", "brier", "auroc"} if classes else {"ll", "rmse", "calibration"}
    )


def test_a_temperature_is_chosen_on_validation_rows():
    task, rows = small(True), parts(True)
    method = learners.METHODS["adamw-temperature"]
    learner, _ = run.train(method, {"lr": 1e-2, "weight_decay": 0.0}, task, rows, 0.5, seed=0)
    before = learner.predict(rows.x_validation).log_prob(rows.y_validation).mean()
    learner = method.finish(learner, task, rows)
    assert learner.temperature != 1.0
    assert learner.predict(rows.x_validation).log_prob(rows.y_validation).mean() > before


def test_results_are_kept_and_settings_are_chosen_once(tmp_path, only):
    path = tmp_path / "arena.json"
    todo = list(run.wanted(["classes"], ["ensemble", "adamw"], [1], 2))
    assert [one["method"] for one in todo] == ["adamw", "ensemble"] * 2
    results = run.Results(path)
    for one in todo:
        assert not results.has(one)
        results.execute(one, lambda name, seed: tasks.named(name).load(seed))
    again = run.Results(path)
    assert all(again.has(one) for one in todo)
    assert list(again.content["chosen"]) == ["classes adamw x1"]
    assert len(again.content["chosen"]["classes adamw x1"]["validation"]) == 6
    settings = [entry["setting"] for entry in again.content["runs"].values()]
    assert all(setting == settings[0] for setting in settings)
    tables = show.grids(again.content)
    assert tables[1].rows[0][0] == "classes"
    assert show.draw(again.content, tmp_path)[0].stat().st_size > 1000


def test_the_summary_counts_pairs(only):
    def one(method, task, ll, seed=0):
        return {"task": task, "method": method, "budget": 1, "seed": seed, "seconds": 1.0, "scores": {"ll": ll}}

    runs = [
        one("noisy-ekfac", "classes", -1.0),
        one("noisy-ekfac", "numbers", -1.0),
        one("noisy-ekfac", "numbers", -3.0, 1),
    ]
    runs += [one("adamw", "classes", -1.5), one("adamw", "numbers", -0.5)]
    table = show.summary({str(i): entry for i, entry in enumerate(runs)}, [1])
    assert table.rows == [["AdamW", "1 of 2 (+0.000)"]]


def test_damaged_results_are_refused(tmp_path):
    path = tmp_path / "arena.json"
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="cannot be read by this version"):
        run.Results(path)


def test_tasks_that_the_defaults_were_found_on_say_so():
    tables = {"protein", "concrete", "kin8nm", "power", "wine", "energy"}
    choosing = {name for name, task in tasks.TASKS.items() if task.role == tasks.CHOOSING}
    assert choosing == {"fashion", "deep", "some", "digits", "convnet-bn", "sequence", *tables}
    assert {task.role for task in tasks.TASKS.values()} == {tasks.CHOOSING, tasks.REPORTING}
    assert len(tasks.TASKS) >= 12


def test_networks_fit_their_inputs():
    shapes = dict.fromkeys(("sequence", "recurrent"), torch.zeros(2, tasks.LENGTH, dtype=torch.long))
    shapes["cancer"] = torch.zeros(2, 30)
    for name, task in tasks.TASKS.items():
        image = name.startswith(("convnet", "resnet"))
        inputs = 784 if name in ("fashion", "deep", "few", "some", "grey") else 64
        x = shapes.get(name, torch.zeros(2, 3, 32, 32) if image else torch.zeros(2, inputs))
        if not task.classes:
            x = torch.zeros(2, next(m for m in task.network().modules() if isinstance(m, nn.Linear)).in_features)
        assert task.network()(x).shape[0] == 2


def test_packaged_tables_are_standardised_and_counted_sequences_hold_their_class():
    rows = tasks.named("diabetes").load(0)
    assert rows.y.mean().abs() < 0.2
    assert 0.8 < rows.x.std() < 1.2
    cancer = tasks.named("cancer").load(1)
    assert set(cancer.y.tolist()) == {0, 1}
    sequences = tasks.named("recurrent").load(0)
    counts = torch.stack([(sequences.x == word).sum(1) for word in range(4)], 1)
    assert torch.equal(counts.argmax(1), sequences.y)
    assert (counts.sort(1).values == torch.tensor([2, 2, 2, 3])).all()

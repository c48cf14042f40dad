"""The benchmark: kinds of steps, amortising, tables, and what grew; no time is asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import eigenoise as en
from eigenoise.cli import app
from eigenoise.reporting.tables import markdown
from eigenoise.studies.bench import growth, measure, peers, run, show
from eigenoise.studies.bench.cases import CASES, Case
from eigenoise.studies.bench.steps import OURS, STUDY, Stepper


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def stepper(**options) -> Stepper:
    model, likelihood = en.models.MLP(3, [4], 1), en.GaussianLikelihood()
    opt = en.NoisyEKFAC(model, num_data=50, likelihood=likelihood, **options)
    x, y = torch.randn(5, 3), torch.randn(5, 1)

    def step() -> None:
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()

    return Stepper(step, opt)


def test_a_cycle_is_made_of_its_kinds():
    kinds = stepper(stats_every=10, refresh_every=100).kinds()
    assert {kind: share for kind, (_, share) in kinds.items()} == pytest.approx(
        {"statistics and basis 1": 0.01, "plain": 0.9, "statistics": 0.09}
    )
    kinds = stepper(stats_every=1, refresh_every=5, reinit_every=50).kinds()
    assert sum(share for _, share in kinds.values()) == pytest.approx(1.0)
    assert kinds["statistics and reset and basis 1"][1] == pytest.approx(0.02)


def test_a_step_of_each_kind_does_what_is_due():
    one = stepper(stats_every=10, refresh_every=100)
    one.step()
    basis = one.optimizer.slots[0].fisher.factors
    for kind, (place, _) in one.kinds().items():
        before = basis.inputs.moments.clone(), basis.q_in.clone()
        one.seek(place)
        one.step()
        assert torch.equal(before[0], basis.inputs.moments) == ("statistics" not in kind)
        assert torch.equal(before[1], basis.q_in) == ("basis" not in kind)


def test_ratios_are_amortised(monkeypatch):
    case = CASES["a"]()
    seconds = {0: 8.0, 10: 3.0, 1: 2.0}  # by place in the cycle, where SGD takes 1
    monkeypatch.setattr(measure, "_time", lambda s, count, place: 1.0 if s.optimizer is None else seconds[place])
    result = measure.ratios(case, {"noisy EK-FAC": OURS["noisy EK-FAC"]}, rounds=2)
    about = result["methods"]["noisy EK-FAC"]
    assert about["ratio"] == pytest.approx((8.0 + 9 * 3.0 + 90 * 2.0) / 100)
    assert about["quartiles"] == pytest.approx([about["ratio"]] * 2)
    assert about["worst"] == pytest.approx(8.0)


@pytest.mark.parametrize("label", [*OURS, *STUDY])
def test_every_method_can_be_timed(label):
    result = measure.ratios(CASES["a"](), {label: {**OURS, **STUDY}[label]}, rounds=1)
    assert result["methods"][label]["ratio"] > 0


def test_a_peer_that_cannot_is_named_with_its_reason():
    def cannot(case: Case) -> Stepper:
        raise peers.Unsupported("it has no such layer")

    result = measure.ratios(CASES["a"](), {"theirs": cannot}, rounds=1)
    assert result["methods"]["theirs"] == {"reason": "it has no such layer"}
    assert "it has no such layer" in show.table("a", {**result, "memory": {}}).markdown()


def test_a_peer_that_fails_does_not_end_the_benchmark(monkeypatch):
    def broken(case: Case) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(peers, "installed", lambda: {"theirs": broken})
    monkeypatch.setattr(run, "OURS", {})
    monkeypatch.setattr(run, "MORE", {})
    results: dict[str, Any] = {"cases": {}}
    for part in run.parts(["a"], rounds=1, peers=True, memory=True, growth=False):
        part.run(results, lambda label: None)
    reason = "it fails with RuntimeError: operator torchvision::nms does not exist"
    assert results["cases"]["a"]["methods"] == {"theirs": {"reason": reason}}
    assert list(results["cases"]["a"]["memory"]) == ["SGD"]


def test_case_names_are_their_own():
    for name in ("a", "b", "d"):
        case = CASES[name]()
        assert case.name == name
        model = case.make()
        assert torch.isfinite(case.loss(model(case.x[:2]), case.y[:2]))


def test_memory_is_that_of_a_process_of_its_own():
    ballast = torch.ones(150_000_000)  # 600 MB that must not be counted
    used = measure.peak_memory("a", "SGD")
    assert 50 < used < 600
    assert ballast[0] == 1


def results(ratio: float, megabytes: float = 500.0) -> dict:
    about = {"ratio": ratio, "quartiles": [0.95 * ratio, 1.05 * ratio], "ms": 1.0, "worst": 3.0, "kinds": {}}
    case = {"title": "a case", "sgd_ms": 0.5, "methods": {"ours": about}, "memory": {"SGD": 400.0, "ours": megabytes}}
    return {"environment": {}, "cases": {"a": case}}


def test_what_grew_is_named():
    assert show.grown(results(2.0), results(2.0)) == []
    assert show.grown(results(2.2), results(2.0)) == []  # within the noise of a shared machine
    assert show.grown(results(2.5), results(2.0)) == ["(a) ours: 2.00 before, 2.50 now"]
    assert show.grown(results(1.0, 700.0), results(2.0)) == ["(a) ours: 500 MB before, 700 MB now"]
    assert show.grown(results(9.0), {"cases": {}}) == []


def test_tables_and_pictures(tmp_path):
    sizes = [64, 128, 256, 512]
    whole = results(2.0) | {"growth": {"width": {"sizes": sizes, "ms": {"plain": [s**2 / 1e4 for s in sizes]}}}}
    text = markdown(show.grids(whole))
    assert "| ours | 2.00 | 1.90–2.10 | 3.0 | 1 | 500 |" in text
    assert "| 2.00 | 2 |" in text  # fitted power, theory
    assert all(path.stat().st_size > 1000 for path in show.pictures(whole, tmp_path))


def test_the_fitted_power_is_that_of_the_largest_sizes():
    sizes = [1, 10, 100, 1000]
    assert growth.exponent(sizes, [5.0, *(s**1.5 for s in sizes[1:])]) == pytest.approx(1.5)


def test_growth_is_measured_by_kind():
    axis = growth.Axis("width", (4, 8), lambda size: growth._network(width=size, batch=4), {})
    found = dict(growth.measure(axis, rounds=1))
    assert list(found) == [4, 8]
    assert set(found[4]) == {"plain", "statistics", "basis"}


def test_the_command_runs_and_compares(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "OURS", {"noisy EK-FAC": OURS["noisy EK-FAC"]})
    monkeypatch.setattr(run, "MORE", {})
    monkeypatch.setattr(peers, "installed", dict)
    old = tmp_path / "old.json"
    about = {"ratio": 1e-3, "quartiles": [1e-3, 1e-3]}
    old.write_text(json.dumps({"cases": {"a": {"methods": {"noisy EK-FAC": about}}}}))
    command = ["bench", "a", "--rounds", "1", "--no-memory", "--out", str(tmp_path / "out"), "--against", str(old)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "(a) noisy EK-FAC: 0.00 before" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "bench.md", "bench.png", "bench.svg"}


def test_the_command_refuses_what_it_does_not_know(tmp_path):
    result = CliRunner().invoke(app, ["bench", "z", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "case must be one of 'a', 'b', 'c', 'c+bn', 'c+bf16', 'd', got 'z'" in result.output
    result = CliRunner().invoke(app, ["bench", "a", "--against", str(tmp_path / "none.json"), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "none.json" in result.output


def test_cases_timed_before_are_kept(tmp_path):
    path = tmp_path / "bench.json"
    fresh = run.begun(path)
    assert fresh["cases"] == {}
    path.write_text(json.dumps({**fresh, "cases": {"b": {}}}))
    assert run.begun(path)["cases"] == {"b": {}}
    path.write_text(json.dumps({**fresh, "environment": {"torch": "1.0"}}))
    with pytest.raises(ValueError, match="choose another folder"):
        run.begun(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="no result of this benchmark"):
        run.begun(path)

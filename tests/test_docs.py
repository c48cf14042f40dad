"""The README's code runs, the examples run, and the pages name only things that exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eigenoise.studies.bench import show
from eigenoise.version import __version__

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_code_runs(tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    space: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), space)
    assert (tmp_path / "posterior.safetensors").is_file()
    assert "Eigen Fisher" in capsys.readouterr().out
    error = (space["pred"].mean - space["y"][:5]).abs().max()
    assert error < 1.0  # it learned something: the targets' spread is about 0.8


def test_the_readmes_diff_matches_its_code():
    text = (ROOT / "README.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    added = [line[1:].split("#")[0].strip() for line in diff.splitlines() if line.startswith("+")]
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(added) == 4
    for line in added[1:3]:
        assert line in code


@pytest.mark.parametrize("name", ["index", "examples"])
def test_code_on_pages_runs(name, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    assert blocks
    space: dict = {}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), space)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(path, tmp_path, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    seeds = ["--seeds", "1"] if "--seeds" in path.read_text() else []
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", "10", *seeds])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
    for picture in re.findall(r"\w+\.png", path.read_text()):
        assert (tmp_path / picture).is_file()


def test_the_examples_page_lists_every_example():
    text = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if f"`{path.name}`" not in text] == []


def test_the_site_builds_without_warnings_and_without_network(tmp_path):
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(mkdocs, cwd=ROOT, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    maths = (tmp_path / "site" / "maths" / "index.html").read_text()
    assert maths.count("<math") > 30
    assert "$" not in re.sub(r"<script.*?</script>", "", maths, flags=re.DOTALL)
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?:[^"]+)', page.read_text()
        )
        assert loaded == [], f"{page} loads {loaded}"


def test_the_maths_page_has_every_equation():
    text = (ROOT / "docs" / "maths.md").read_text()
    named = {int(number) for group in re.findall(r"\(([\d, and;]+)\)", text) for number in re.findall(r"\d+", group)}
    more = {int(number) for group in re.findall(r"; ([\d, ]+)\)", text) for number in re.findall(r"\d+", group)}
    assert named | more >= set(range(1, 22))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_on_a_page_exist(page):
    text = page.read_text()
    for name in set(re.findall(r"`(eigenoise(?:\.\w+)+)`", text)):
        assert resolve(name), f"{page.name} names {name}, which does not exist"
    for file, path in set(re.findall(r"`(tests/\w+\.py)((?:::\w+)*)`", text)):
        tree = ast.parse((ROOT / file).read_text())
        for part in path.split("::")[1:]:
            tree = next((node for node in tree.body if getattr(node, "name", None) == part), None)
            assert tree is not None, f"{page.name} names {file}{path}, which does not exist"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}, which does not exist"


def resolve(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_equation_map_is_complete():
    text = (ROOT / "docs" / "paper.md").read_text()
    rows = re.findall(r"^\| (\w[\w ]*) \|", text, re.MULTILINE)
    assert [int(row) for row in rows if row.isdigit()] == list(range(1, 22))
    assert {"Algorithm 1", "Algorithm 2"} <= set(rows)


def test_design_lists_every_room():
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = {p.stem for p in (ROOT / "src" / "eigenoise").iterdir() if not p.name.startswith(("_", "py.", "version"))}
    assert {room for room in rooms if f"`{room}`" not in text} == set()


def test_notation_knows_every_hyperparameter():
    import eigenoise as en

    opt = en.NoisyEKFAC(torch.nn.Linear(2, 1), num_data=3, likelihood=en.GaussianLikelihood())
    text = (ROOT / "docs" / "notation.md").read_text()
    for name in ("lr", "kl_weight", "prior_var", "num_data", "damping", "ema_factors", "ema_scale"):
        assert name in opt.param_groups[0]
        assert f"`{name}`" in text


def benchmark(name):
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_results_page_is_what_the_result_files_say():
    assert (ROOT / "docs" / "results.md").read_text() == benchmark("study_pages").page()


def test_the_classification_page_is_what_the_result_files_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert (ROOT / "docs" / "classification_results.md").read_text() == benchmark("vision_pages").page()


def test_the_arenas_page_is_what_the_result_file_says():
    text = (ROOT / "docs" / "arena.md").read_text()
    assert benchmark("arena_pages").page(text) == text


def test_committed_results_say_which_version_they_are_of():
    """Results of another version than this one's are shown as such, on the pages that show them."""
    pages = {"uci": "regression.md", "cifar10": "classification.md", "cifar10_long": "classification.md"}
    for name, page in pages.items():
        paths = sorted((ROOT / "benchmarks" / "results" / name).glob("*.json"))
        assert paths
        versions = {json.loads(path.read_text())["environment"]["eigenoise"] for path in paths}
        text = (ROOT / "docs" / page).read_text()
        for version in versions - {__version__}:
            assert f"with version {version}" in text, (page, version)


def test_the_scaling_page_is_what_the_cost_model_and_the_result_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    model = importlib.import_module("cost_model")
    text = (ROOT / "docs" / "scaling.md").read_text()
    found = json.loads((model.RESULTS / "processes.json").read_text())
    one = found["together"]["1"]["images_per_second"]
    for count, own in found["together"].items():
        speed, apart = own["images_per_second"], found["apart"].get(count, found["together"]["1"])["images_per_second"]
        row = f"{speed:.1f} | {speed / one:.2f} | {apart / one:.2f} | {own['peak_mb']:,.0f} |"
        assert row in text, row
    measured, vgg = json.loads(model.OUT.read_text()), model.vgg16()
    kept = found["together"]["1"]["kept"]
    assert f"{vgg.total(lambda x: x.kept) / 1e6:.2f} million numbers kept against {kept / 1e6:.2f}" in text
    kinds = found["together"]["1"]["kinds"]
    guesses = [model.foretold(vgg, kinds, count, measured)["mean of a cycle"] for count in (2, 4)]
    timed = [found["together"][count]["seconds"] for count in ("2", "4")]
    words = "{:.2f} s with two processes and {:.2f} s with four, where {:.2f} s and {:.2f} s were timed"
    assert words.format(*guesses, *timed) in text
    for network in (model.resnet50(), model.VIT, model.BILLION):
        alone, eight = (model.busiest(network.each(), ranks) for ranks in (1, 8))
        weights, kept = network.total(lambda x: x.weights), network.total(lambda x: x.kept)
        sent = network.total(lambda x: x.weights + x.reduced + x.broadcast)
        row = (
            f"{weights / 1e6:,.0f} million | {4e-9 * kept:.2f} GB | {4e-9 * sent:.2f} GB | "
            f"{model.seconds_of(alone[0], measured):,.1f} s | "
            f"{model.seconds_of(eight[0], measured):.1f} s | {model.seconds_of(alone[1], measured):.1f} s |"
        )
        assert row in text, row


def test_the_page_of_what_breaks_is_what_the_result_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    text = (ROOT / "docs" / "robustness.md").read_text()
    kills, fuzz, stability = (importlib.import_module(name) for name in ("kills", "fuzz", "stability"))
    killed = json.loads(kills.OUT.read_text())["methods"].values()
    assert sum(each["kills"] for each in killed) >= 200
    for each in killed:
        assert each["same_bytes"]
        row = f"| {each['kills']} | {each['left_half_a_file']} | {each['passes']} | {each['passes_in_vain']} | yes |"
        assert row in text, row
    for name, counts in json.loads(fuzz.OUT.read_text())["readers"].items():
        assert f"| {name} | {sum(counts.values()):,} | {counts['understood']} | {counts['refused']} |" in text
    found = json.loads(stability.OUT.read_text())
    for kind, label in (("runs", ""), ("unguarded", " without the guard")):
        assert not any(run["end"] == "NaN" for run in found[kind].values())
        for name, method in (
            ("noisy EK-FAC", "noisy-ekfac"),
            ("noisy K-FAC", "noisy-kfac"),
            ("noisy Adam", "noisy-adam"),
        ):
            ends = stability.ends(found[kind], method)
            if ends:
                cells = (f"{learned} of {count}" if count else "" for learned, count in ends)
                row = f"| {name}{label} | {' | '.join(cells)} |"
                assert row in text, row


def test_the_tables_page_is_what_the_result_file_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("tables")
    text = (ROOT / "docs" / "tables.md").read_text()
    rows = tables.cells(json.loads(tables.OUT.read_text()))
    assert len(rows) == 9
    for row in rows:
        assert f"| {' | '.join(row)} |" in text


def test_costs_on_the_pages_are_those_of_the_committed_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "bench" / "bench.json").read_text())
    table = show.summary(results).markdown().splitlines()[2:]
    assert [line for line in table if line not in (ROOT / "docs" / "speed.md").read_text()] == []
    short = ["noisy EK-FAC", "noisy K-FAC", "noisy Adam", "BBB", "EK-FAC", "K-FAC", "IVON (ivon-opt)"]
    short += ["BBB (bayesian-torch)", "SINGD dense, every 10 (singd)"]
    table = show.summary(results, ["a", "b", "c"], short).markdown().splitlines()[2:]
    assert [line for line in table if line not in (ROOT / "README.md").read_text()] == []


def test_attacks_on_the_page_are_those_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    results = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    assert benchmark("faults").table(results) in (ROOT / "docs" / "robustness.md").read_text()


def test_learning_from_scratch_on_the_page_is_that_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    results = json.loads((ROOT / "benchmarks" / "results" / "from_scratch.json").read_text())
    assert benchmark("from_scratch").table(results) in (ROOT / "docs" / "choosing.md").read_text()

"""The page made from results: everything in one file, every kind of result, seen in a browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from eigenoise.cli import app
from eigenoise.studies import html_report
from eigenoise.tabular.learning import learn

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHORT = {"hidden_layer_sizes": (8,), "max_epochs": 3, "kl_weight": 0.3, "early_stopping": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of every kind; the target's name wants to be a tag."""
    out = tmp_path_factory.mktemp("results <b>")
    for name in ("yacht-noisy-ekfac-best", "yacht-bbb-best"):
        shutil.copy(RESULTS / "uci" / f"{name}.json", out)
    shutil.copy(RESULTS / "bench" / "bench.json", out)
    tuned = sorted((RESULTS / "cifar10_tuning").glob("*/noisy-ekfac-D-0.json"))[0]
    shutil.copy(tuned, out)
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(60, 3)), columns=["a", "b", "<i>y"])
    learn(frame, "<i>y", **SHORT).save(out / "numbers.model")
    frame["label"] = np.where(frame["a"] > 0, "yes", "no")
    learn(frame, "label", **SHORT).save(out / "labels.model")
    (out / "other.model").write_bytes(b"not ours")
    return out


@pytest.fixture(scope="module")
def text(folder):
    return html_report.build(folder)


class Tags(HTMLParser):
    """Whether every tag that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_shows_every_kind_of_result(text):
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert titles == [
        "Regression, preset best",
        "Classification of CIFAR-10",
        "label (labels.model)",
        "&lt;i&gt;y (numbers.model)",
        "What a step costs",
    ]
    for word in ("Predicted against true", "Reliability of probabilities", "Calibration of intervals", "Spectra of"):
        assert word in text


def test_the_page_is_well_formed_and_complete_in_itself(text):
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<i>" not in text
    assert "script" not in tags.seen
    assert "link" not in tags.seen
    sources = re.findall(r'src="([^"]*)"', text)
    assert len(sources) == tags.seen.count("img") >= 7
    for source in sources:
        kind, code = source.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(code)
    assert not re.findall(r'(?:src|href)="https?:', text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_the_command_writes_it(folder, tmp_path):
    out = tmp_path / "new" / "report.html"
    found = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert out.read_text().startswith("<!doctype html>")
    empty = tmp_path / "empty"
    empty.mkdir()
    for wrong, message in ((empty, "holds no results"), (tmp_path / "none", "there is no folder")):
        found = CliRunner().invoke(app, ["report", str(wrong), "--out", str(out)])
        assert found.exit_code == 2
        assert message in found.stderr
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on this machine")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it_without_scrolling_sideways(text, tmp_path, width):
    asks = (
        "<script>addEventListener('load', () => { const e = document.documentElement;"
        " const broken = [...document.images].filter(i => !i.naturalWidth).length;"
        " document.title = `${broken} ${e.scrollWidth - e.clientWidth}`; });</script></body>"
    )
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", asks))
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    done = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *quiet),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000"),
            *("--dump-dom", f"file://{path}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "<title>0 0</title>" in done.stdout, re.findall("<title>.*?</title>", done.stdout)


def _without(key):
    def change(result):
        del result[key]

    return change


def _set(key, value):
    return lambda result: result["settings"].__setitem__(key, value)


DAMAGED = {
    "no rmse": ("yacht-bbb-best.json", _without("rmse"), "lacks 'rmse'"),
    "rmse of nothing": ("yacht-bbb-best.json", lambda result: result.update(rmse=[]), "rmse: expected a list"),
    "ll of words": ("yacht-bbb-best.json", lambda result: result.update(ll=["a"]), "ll: expected a list of numbers"),
    "unknown method": ("yacht-bbb-best.json", _set("method", "magic"), "method must be one of"),
    "unknown method of images": ("noisy-ekfac-D-0.json", _set("method", "magic"), "method must be one of"),
    "unknown setting": ("noisy-ekfac-D-0.json", _set("setting", "E"), "setting must be one of"),
    "no scores of the mean": ("noisy-ekfac-D-0.json", lambda r: r["scores"].pop("mean"), "lacks 'mean'"),
    "scores a list": ("noisy-ekfac-D-0.json", lambda result: result.update(scores=[1]), "is not"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_results_that_lack_something_are_named(folder, tmp_path, case):
    name, change, said = DAMAGED[case]
    shutil.copytree(folder, tmp_path / "results")
    path = tmp_path / "results" / name
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=rf"{name} looks like a result but .*{said}.*; move it away"):
        html_report.build(tmp_path / "results")


def test_a_result_that_is_too_deep_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "results")
    (tmp_path / "results" / "yacht-deep-best.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match=r"yacht-deep-best\.json looks like a result but is not"):
        html_report.build(tmp_path / "results")

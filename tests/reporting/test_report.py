"""Tables and pictures of the regression study: every number in them follows from the result files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eigenoise.optim.methods import BAYESIAN
from eigenoise.reporting import figures
from eigenoise.reporting.tables import mean_and_error
from eigenoise.studies.classification.training import METHODS
from eigenoise.studies.regression import report


def result(method, ll, rmse=(1.0, 2.0, 3.0), elbo=(-1.0, -1.1, -1.2), name="yacht", sample=False):
    return {
        "format": 2,
        "settings": {"set": name, "method": method, "preset": "paper", "splits": len(ll), "canonical": False},
        "sample_of_the_set": sample,
        "ll": list(ll),
        "rmse": list(rmse),
        "elbo": list(elbo),
        "coverage": {"0.5": [0.4, 0.5, 0.6], "0.9": [0.8, 0.9, 1.0]},
        "curve": [-3.0, -2.0, -1.0],
    }


def both(**options):
    return [
        result("noisy-ekfac", (-2.0, -3.0, -4.0), **options),
        result("bbb", (-2.1, -3.2, -4.3), rmse=(0.9, 1.9, 2.9), **options),
    ]


def test_scores_stand_beside_the_papers_and_the_best_is_bold():
    ll, rmse, elbo = report.grids(both())[:3]
    assert ll.header == ["set", "BBB", "noisy EK-FAC"]  # in the paper's order, whatever order they came in
    assert ll.rows == [["yacht", "-3.200 ± 0.635 (-2.408)", "-3.000 ± 0.577 (-2.224)"]]
    assert ll.bold == {(0, 2)}
    assert rmse.rows == [["yacht", "1.900 ± 0.577 (1.174)", "2.000 ± 0.577 (0.974)"]]
    assert rmse.bold == {(0, 1)}  # less is better
    assert elbo.rows[0][1:] == ["-1.100 ± 0.058"] * 2


def test_differences_are_paired_by_split():
    grid = report.grids(both())[3]
    differences = np.array([-0.1, -0.2, -0.3])
    error = differences.std(ddof=1) / 3**0.5
    assert error == pytest.approx(0.0577, abs=1e-4)  # the unpaired one would be ten times as large
    assert grid.header == ["set", "BBB − noisy EK-FAC"]
    assert grid.rows == [["yacht", f"-0.200 ± {error:.3f}"]]


def test_without_the_reference_there_are_no_differences():
    assert len(report.grids([result("bbb", (-1.0, -2.0, -3.0))])) == 3
    assert len(report.grids([result("noisy-ekfac", (-1.0, -2.0, -3.0))])) == 3


def test_a_missing_run_is_a_dash_and_a_sample_is_marked():
    results = [*both(), result("noisy-ekfac", (-1.0,) * 3, name="year", sample=True)]
    grids = report.grids(results)
    for grid in (grids[0], grids[3]):
        assert [row[0] for row in grid.rows] == ["yacht", "year (sample)"]
        assert grid.rows[1][1] == "–"


def test_runs_of_other_splits_are_not_paired():
    results = [result("noisy-ekfac", (-1.0, -2.0, -3.0)), result("bbb", (-1.0,)), result("noisy-adam", (-1.0,) * 3)]
    results[2]["settings"]["canonical"] = True
    assert report.grids(results)[3].rows == [["yacht", "other splits", "other splits"]]


def test_all_that_are_best_are_bold():
    results = [result("noisy-ekfac", (-1.0, -2.0, -3.0)), result("bbb", (-1.0, -2.0, -3.0))]
    results.append(result("noisy-adam", (-1.5, -2.0, -3.0)))
    assert report.grids([*both(), result("noisy-kfac", (-2.0, -3.0, -4.0))])[0].bold == {(0, 2), (0, 3)}
    assert report.grids(results)[0].bold == {(0, 1), (0, 3)}


def test_markdown_has_one_line_a_row_and_bold_cells():
    lines = report.grids(both())[0].markdown().splitlines()
    assert lines[0] == "**Test log-likelihood, mean ± standard error over splits (the paper's in brackets)**"
    assert lines[2] == "| set | BBB | noisy EK-FAC |"
    assert lines[3] == "| --- | ---: | ---: |"
    assert lines[4] == "| yacht | -3.200 ± 0.635 (-2.408) | **-3.000 ± 0.577 (-2.224)** |"


@pytest.mark.parametrize(
    ("values", "sign", "shown"),
    [
        ([1.0, 3.0], False, "2.000 ± 1.000"),
        ([2.0], False, "2.000"),
        ([2.0], True, "+2.000"),
        ([0.0004, 0.0006], False, "0.00050 ± 0.00010"),  # Naval's errors need more digits
        ([0.0004], False, "0.00040"),
        ([0.0101, -0.0099, 0.0002], True, "+0.000 ± 0.006"),
        ([1.00001, 1.00002], False, "1.000015 ± 0.000005"),
        ([0.0, 0.0], False, "0.000 ± 0.000"),
    ],
)
def test_numbers(values, sign, shown):
    assert mean_and_error(values, sign) == shown


def test_the_same_results_give_the_same_files(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        for one in both():
            (folder / f"yacht-{one['settings']['method']}-paper.json").write_text(json.dumps(one))
        paths = report.write(folder, "paper")
        assert [path.name for path in paths] == [
            "tables-paper.md",
            "curves-paper.png",
            "curves-paper.svg",
            "calibration-paper.png",
            "calibration-paper.svg",
        ]
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    assert len(report.collect(first, "paper")) == 2
    assert report.collect(first, "best") == []


def test_pictures_of_covariances(tmp_path):
    planes = [{"weights": ["a", "b"], "covariance": {"full": [[1, 0.5], [0.5, 1]], "EMVG": [[1, 0.4], [0.4, 1]]}}]
    layer = {"name": "0", "kfac": [[1.0, 0.1, 0.0], [0.5, 0.05, 0.0]], "ekfac": [[2.0, 0.1, 0.1], [0.5, 0.0, 0.0]]}
    for paths in (
        figures.covariance_cartoon(planes, tmp_path / "one"),
        figures.scaling(layer, tmp_path / "two"),
    ):
        assert [path.suffix for path in paths] == [".png", ".svg"]
        assert all(path.stat().st_size > 1000 for path in paths)


def test_every_method_has_a_label_and_a_colour():
    assert set(BAYESIAN) | set(METHODS) == set(figures.LABELS) == set(figures.COLORS)

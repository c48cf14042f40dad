"""The UCI sets: hashes, canonical splits, clear words when a file is missing or damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from eigenoise.studies import data
from eigenoise.studies.data import DataFileError, files, uci

REAL = os.environ.get("EIGENOISE_DATA")
real_data = pytest.mark.skipif(not REAL, reason="EIGENOISE_DATA names no folder with the real sets")


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("pooch.retrieve", refuse)


def test_the_registry_knows_every_file_of_every_set():
    registry = files.uci_registry()
    for about in uci.SETS.values():
        if about.folder:
            for name in ("data", "index_features", "index_target"):
                assert len(registry[f"{about.folder}/data/{name}.txt"]) == 64


@real_data
@pytest.mark.parametrize("name", [name for name in uci.SETS if name not in ("year", "protein")])
def test_real_sets(name):
    about, table = uci.info(name), uci.load(name)
    assert table.x.shape == (about.rows, about.inputs)
    assert np.isfinite(table.x).all()
    splits = uci.canonical_splits(table, [0, about.splits - 1])
    assert splits.x_train.shape[1] + splits.x_test.shape[1] == about.rows
    torch.testing.assert_close(
        splits.x_train.mean(1), torch.zeros(2, about.inputs, dtype=torch.float32), rtol=0, atol=1e-4
    )
    spread = splits.x_train.std(1, correction=0)
    assert ((spread - 1).abs().lt(1e-3) | spread.eq(0)).all()  # Naval has constant columns
    torch.testing.assert_close(
        splits.y_train.std(1, correction=0), torch.ones(2, 1, dtype=torch.float32), rtol=1e-4, atol=0
    )


@real_data
@pytest.mark.parametrize("name", [name for name in uci.SETS if name != "year"])
def test_canonical_rows_are_the_published_ones(name):
    about = uci.info(name)
    folder = Path(REAL) / "uci" / about.folder / "data"
    for number, (train, test) in enumerate(uci.canonical_rows(name, range(about.splits))):
        np.testing.assert_array_equal(train, np.loadtxt(folder / f"index_train_{number}.txt"))
        np.testing.assert_array_equal(test, np.loadtxt(folder / f"index_test_{number}.txt"))


@real_data
def test_naval_has_two_tasks():
    canonical, turbine = uci.load("naval"), uci.load_naval_turbine()
    assert canonical.x.shape[1] == 16
    assert turbine.x.shape[1] == 17
    np.testing.assert_array_equal(turbine.x[:, 16], canonical.y)


@real_data
def test_year_is_a_sample_here():
    splits, is_sample = uci.year_splits()
    assert is_sample
    assert splits.x_train.shape == (1, 5000, 90)
    assert splits.x_test.shape == (1, 2000, 90)


@real_data
def test_boston_from_the_package_is_the_uci_set(tmp_path):
    bundled = uci.load("boston", tmp_path)  # an empty cache
    np.testing.assert_allclose(bundled.x, uci.load("boston").x)


@real_data
def test_a_damaged_file_is_refused_by_name(tmp_path):
    folder = tmp_path / "uci" / "yacht" / "data"
    shutil.copytree(Path(REAL) / "uci" / "yacht" / "data", folder)
    folder.chmod(0o755)
    path = folder / "data.txt"
    path.chmod(0o644)
    uci.load("yacht", tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataFileError, match=r"data\.txt is damaged"):
        uci.load("yacht", tmp_path)


def test_a_missing_file_says_where_from_and_where_to(tmp_path, offline):
    with pytest.raises(DataFileError) as caught:
        uci.load("yacht", tmp_path)
    text = str(caught.value)
    assert "yacht/data/data.txt" in text
    assert files.UCI_SOURCE in text
    assert str(tmp_path / "uci" / "yacht" / "data" / "data.txt") in text


def test_year_missing(tmp_path):
    with pytest.raises(DataFileError, match=r"YearPredictionMSD\.txt"):
        uci.year_splits(tmp_path)
    for content in (b"no archive", b"", b"PK\x03\x04 cut short"):
        (tmp_path / "year_sample.npz").write_bytes(content)
        with pytest.raises(DataFileError, match="cannot be read"):
            uci.year_splits(tmp_path)
    (tmp_path / "YearPredictionMSD.txt").write_text("2001,1.0,2.0\n")
    with pytest.raises(DataFileError, match="is not whole"):
        uci.year_splits(tmp_path)


@pytest.mark.parametrize(("word", "near"), [("bostom", "boston"), ("Energy", "energy"), ("power-plant", "power")])
def test_the_nearest_name_is_offered(word, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        uci.load(word)


def test_split_numbers_are_checked():
    for number in (-1, 20):
        with pytest.raises(ValueError, match=f"split: expected 0 to 19 for yacht, got {number}"):
            uci.canonical_rows("yacht", [0, number])


def test_an_unknown_set_without_a_near_one_is_a_sentence():
    with pytest.raises(ValueError, match=r"there is no UCI set 'zzz'\. The sets are boston, "):
        uci.info("zzz")


def test_boston_needs_no_download_even_after_a_failed_one(tmp_path, offline):
    (tmp_path / "uci" / "bostonHousing" / "data").mkdir(parents=True)
    splits = uci.canonical_splits(uci.load("boston", tmp_path), [0, 19])
    assert splits.x_train.shape == (2, 455, 13)


def test_splits_need_a_split():
    table = data.Table("t", np.zeros((5, 1)), np.zeros(5))
    with pytest.raises(ValueError, match="splits: expected at least one, got none"):
        data.standardised(table, [])

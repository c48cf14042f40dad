"""Damaged files of every kind are understood or refused with a word, and nothing else; benchmarks/fuzz.py has more."""

from __future__ import annotations

import pytest
import torch

import fuzzing
from eigenoise.studies.data import images


@pytest.mark.parametrize("name", fuzzing.READERS)
def test_damaged_files_are_understood_or_refused(name, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(images, "RECORDS", 1)
    counts = fuzzing.fuzz(name, 60, 0, tmp_path)
    assert counts["refused"] > 0
    assert sum(counts.values()) == 60

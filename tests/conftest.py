"""One thread and double precision for every test; a test that wants float32 says so."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("SCIPY_ARRAY_API", "1")  # before scipy is imported: one of scikit-learn's checks asks for it


@pytest.fixture(autouse=True)
def _float64_and_seed():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """No data but Boston, from its package."""
    monkeypatch.setenv("EIGENOISE_DATA", str(tmp_path / "cache"))

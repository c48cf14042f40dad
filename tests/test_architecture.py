"""How the package is put together: few entries, short files, light imports. `make check` sees to their order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eigenoise

SOURCE = Path(eigenoise.__file__).parent


def test_the_package_has_few_entries():
    hidden = ("__pycache__", "__init__.py", "__main__.py", "py.typed", "version.py")
    assert len([path for path in SOURCE.iterdir() if path.name not in hidden]) <= 15


def test_files_stay_readable():
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_public_names_are_few_and_exist():
    assert len(eigenoise.__all__) <= 20
    for name in eigenoise.__all__:
        assert hasattr(eigenoise, name)


def test_import_loads_only_torch_and_numpy():
    heavy = ["matplotlib", "rich", "typer", "safetensors", "sklearn", "mlxtend", "pandas", "scipy", "pooch", "jinja2"]
    code = f"import eigenoise, sys; eigenoise.NoisyEKFAC; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_all_public_names_are_there_and_no_others():
    code = "from eigenoise import *; import eigenoise as en; print(NoisyEKFAC.__name__, predict.__module__, en.predict)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("NoisyEKFAC eigenoise.inference.predict <function predict")
    code = (
        "import eigenoise, sys; eigenoise.__version__; assert 'torch' not in sys.modules; print(eigenoise.optim.KFAC)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KFAC" in result.stdout
    assert set(eigenoise.__all__) <= set(dir(eigenoise))
    with pytest.raises(AttributeError, match="'eigenoise' has no attribute 'NoisyFAC'"):
        _ = eigenoise.NoisyFAC


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["fit", "--help"], ["cifar10", "--help"]])
def test_help_answers_without_torch(arguments):
    code = f"import sys; sys.argv = ['eigenoise', *{arguments}]\nfrom eigenoise.cli import app\n"
    code += "try:\n    app()\nfinally:\n    print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr.split() == ["False", "False"]


def test_any_module_can_be_the_first_that_is_imported():
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in sorted(SOURCE.rglob("*.py"))]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    script = f"""
import sys, importlib
import torch
for name in {names!r}:
    for old in [each for each in sys.modules if each.split(".")[0] == "eigenoise"]:
        del sys.modules[old]
    importlib.import_module(name)
print("all")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "all\n", done.stderr

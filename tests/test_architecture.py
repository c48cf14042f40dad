"""How the package is put together: modules import only from those above them, and importing it stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import eigenoise

SOURCE = Path(eigenoise.__file__).parent
# In the order data walks through them; a module may import only from what stands before it.
ORDER = [
    "version",
    "atomic",
    "watch",
    "checks",
    "finite",
    "losses",
    "linalg",
    "averages",
    "distributed",
    "wrapping",
    "lockstep",
    "data",
    "models",
    "predictive",
    "metrics",
    "likelihoods",
    "layers",
    "treatment",
    "capture",
    "distributions",
    "fisher",
    "rotated",
    "swap",
    "blocks",
    "posterior",
    "priors",
    "elbo",
    "state",
    "sampling",
    "variational",
    "statistics",
    "clip",
    "guard",
    "turns",
    "natural",
    "optim",
    "spectra",
    "bbb",
    "board",
    "norms",
    "monte_carlo",
    "train",
    "public",
    "__init__",
    "published",
    "runs",
    "checkpoints",
    "presets",
    "trial",
    "experiments",
    "figures",
    "report",
    "vision",
    "estimators",
    "tabular",
    "demo",
    "bench",
    "page",
    "cli",
    "__main__",
]
FISHER_ORDER = ["moments", "sides", "taps", "factors", "base", "diagonal", "kronecker", "eigen", "__init__"]
DATA_ORDER = ["files", "tables", "uci", "images", "transforms", "__init__"]
MODEL_ORDER = ["chain", "stacked", "mlp", "vgg", "resnet", "encoder", "__init__"]
BENCH_ORDER = ["cases", "steps", "peers", "measure", "memory", "growth", "show", "run", "__init__"]
CLI_ORDER = ["base", "tables", "report", "demo", "uci", "cifar10", "bench", "data", "__init__"]
VISION_ORDER = ["point", "recipes", "training", "scores", "study", "show", "__init__"]
ESTIMATOR_ORDER = [
    "rows",
    "calibration",
    "network",
    "progress",
    "base",
    "regressor",
    "classifier",
    "keeping",
    "__init__",
]
TABULAR_ORDER = ["reading", "schema", "baselines", "learning", "__init__"]
LIKELIHOOD_ORDER = ["base", "gaussian", "classes", "__init__"]


def room(path: Path) -> str:
    """The module, or the folder it is in."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[tuple[str, ...]]:
    """What a file imports from the package, as parts after ``eigenoise``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "eigenoise":
            tail = tuple((node.module or "").split(".")[1:])
            found.update({tail} if tail else {(alias.name,) for alias in node.names})
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_upward(path):
    own = room(path)
    assert own in ORDER, f"{own} has no place in ORDER"
    for parts in imports(path):
        if parts[0] != own:
            assert ORDER.index(parts[0]) < ORDER.index(own), f"{own} imports {parts[0]}, which stands below it"
        elif len(parts) > 1:
            order = {
                "fisher": FISHER_ORDER,
                "likelihoods": LIKELIHOOD_ORDER,
                "data": DATA_ORDER,
                "models": MODEL_ORDER,
                "bench": BENCH_ORDER,
                "vision": VISION_ORDER,
                "estimators": ESTIMATOR_ORDER,
                "tabular": TABULAR_ORDER,
                "cli": CLI_ORDER,
            }[own]
            assert order.index(parts[1]) < order.index(path.stem)


def test_files_stay_readable():
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_public_names_are_few_and_exist():
    assert len(eigenoise.__all__) <= 20
    for name in eigenoise.__all__:
        assert hasattr(eigenoise, name)


def test_import_loads_only_torch_and_numpy():
    heavy = ["matplotlib", "rich", "typer", "safetensors", "sklearn", "mlxtend", "pandas", "scipy", "pooch"]
    code = f"import eigenoise, sys; eigenoise.NoisyEKFAC; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_all_public_names_are_there_and_no_others():
    code = "from eigenoise import *; import eigenoise as en; print(NoisyEKFAC.__name__, predict.__module__, en.predict)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("NoisyEKFAC eigenoise.monte_carlo <function predict")
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

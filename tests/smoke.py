"""What a fresh installation must be able to do; run by ``make wheel`` with the installed package."""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import eigenoise as en
from eigenoise.studies.data.files import uci_registry
from eigenoise.studies.recipes import PRESETS, load


def main() -> None:
    assert "site-packages" in en.models.__file__, f"this is not the installed package: {en.models.__file__}"
    assert importlib.metadata.version("eigenoise") == en.__version__
    assert uci_registry(), "the hashes of the data sets are missing"
    assert PRESETS["best"].recipe("boston", "noisy-ekfac").epochs == 300
    assert load("classification")
    assert load("published")
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * torch.randn(60, 1)
    model, likelihood = torch.nn.Linear(3, 1), en.GaussianLikelihood()
    opt = en.NoisyEKFAC(model, num_data=60, likelihood=likelihood)
    for _ in range(300):
        with opt.sampled_params():
            opt.zero_grad()
            likelihood.nll(model(x), y).backward()
        opt.step()
    assert torch.allclose(model.weight, torch.tensor([[1.0, -0.5, 0.0]]), atol=0.1)
    with tempfile.TemporaryDirectory() as folder:
        table, kept, out = (Path(folder) / name for name in ("t.csv", "t.model", "predicted.csv"))
        rows = [f"{a:.3f},{b:.3f},{c:.3f},{d:.3f}" for a, b, c, d in torch.cat([x, y], 1).tolist()]
        table.write_text("\n".join(["a,b,c,d", *rows]))
        command = [str(Path(sys.executable).with_name("eigenoise"))]
        subprocess.run([*command, "--version"], check=True)
        subprocess.run([*command, "fit", table, "--target", "d", "--out", kept, "--hidden", "5"], check=True)
        subprocess.run([*command, "predict", kept, table, "--out", out], check=True)
        subprocess.run([*command, "report", folder, "--out", Path(folder) / "report.html"], check=True)
        assert len(out.read_text().splitlines()) == 61
    print("the installed package works")


if __name__ == "__main__":
    main()

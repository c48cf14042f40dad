"""Attack the library as a stranger would use and abuse it, and count what was survived or refused clearly.

    python benchmarks/faults.py [--part flips hostile numbers misuses processes kills] [--command uci fit]
        [--kills 65] [--data FOLDER] [--show]

Counts are written to benchmarks/results/faults.json after each part; any fault that is neither survived nor refused
stops the script. FOLDER, with CIFAR-10 in it, is wanted for killing the image study; without it that is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import signal
import struct
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import eigenoise as en
import processes
from eigenoise import storage
from eigenoise.cli import app
from eigenoise.studies.data import images, uci
from eigenoise.studies.regression.study import Run
from eigenoise.studies.runner import environment
from eigenoise.tabular import BayesianMLPRegressor, persistence
from eigenoise.tabular.reading import read_table

OUT = Path(__file__).parent / "results" / "faults.json"
METHODS = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop, en.EKFAC, en.KFAC]
Counts = dict[str, int]


def refused(call: Callable[[], object]) -> bool:
    """Whether ``call`` raises an error that says something; anything but an error of the promised kinds is ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, IndexError, KeyError) as error:
        return _says_something(error)
    return False


def _says_something(error: Exception) -> bool:
    assert len(str(error)) > 15, f"an error that says nothing: {error!r}"
    return True


# Files.


def flips(count: int = 1000) -> Counts:
    """Single bits of a posterior's and of a model's file; none may be read."""
    chance, tried = random.Random(0), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for save, load in ((_save_posterior, en.Posterior.load), (_save_model, persistence.load)):
            save(path)
            load(path)
            content = path.read_bytes()
            for place in (chance.randrange(8 * len(content)) for _ in range(count // 2)):
                flipped = bytearray(content)
                flipped[place // 8] ^= 1 << place % 8
                path.write_bytes(flipped)
                assert refused(lambda load=load: load(path)), f"bit {place} went unnoticed"
                tried += 1
    return {"tried": tried, "refused": tried}


def _save_posterior(path: Path) -> None:
    model = network()
    en.NoisyEKFAC(model, num_data=10, likelihood="classification").posterior.save(path)


def _save_model(path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    short = {"max_epochs": 1, "early_stopping": False, "kl_weight": 1.0, "prior_var": 1.0, "members": 1}
    persistence.save(BayesianMLPRegressor((3,), random_state=0, **short).fit(x, x[:, 0]), path)


def hostile() -> Counts:
    """Headers that lie: of safetensors, npz, tar and Parquet files. All are refused, fast and in little memory."""
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for content in _safetensors():
            path.write_bytes(content)
            tried += _is_refused(lambda: en.Posterior.load(path))
        archive = path.with_suffix(".tar.gz")
        for members in _tars():
            _write_tar(archive, members)
            tried += _is_refused(lambda: images._unpack(archive, Path(folder) / "home"))
            assert not (Path(folder).parent / "evil").exists()
        parquet = path.with_suffix(".parquet")
        for content in _parquets(parquet):
            parquet.write_bytes(content)
            tried += _is_refused(lambda: read_table(parquet))
        year = Path(folder) / "year_sample.npz"
        for content in _npzs(year):
            year.write_bytes(content)
            tried += _is_refused(lambda: uci.load("year", Path(folder)))
    return {"tried": tried, "refused": tried}


def _is_refused(call: Callable[[], object]) -> int:
    began = time.monotonic()
    assert refused(call), "a file that lies was read"
    assert time.monotonic() - began < 5, "a file that lies took long"
    return 1


def _safetensors() -> Iterator[bytes]:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    about = [
        {"a": {**tensor, "shape": [10**12]}},
        {"a": {**tensor, "shape": [-4]}},
        {"a": {**tensor, "shape": [2**40, 2**40]}},
        {"a": {**tensor, "data_offsets": [0, 10**15]}},
        {"a": {**tensor, "data_offsets": [16, 0]}},
        {"a": {**tensor, "data_offsets": [-16, 0]}},
        {"a": tensor, "b": tensor},
        {"a": {**tensor, "dtype": "F7"}},
        {"a": {**tensor, "dtype": None}},
        {"a": None},
        {"__metadata__": {"eigenoise": "{"}, "a": tensor},
        {"__metadata__": {"eigenoise": "[" * 10**5}, "a": tensor},
        {"__metadata__": {"eigenoise": json.dumps({"format": 2, "sha256": "0", "layout": {}})}, "a": tensor},
        {"__metadata__": {"eigenoise": json.dumps({"format": 2, "layout": {"0": {"stack": 10**8}}})}, "a": tensor},
        {"__metadata__": {"eigenoise": json.dumps({"format": True})}, "a": tensor},
        {"__metadata__": [1]},
        [],
        "a",
    ]
    for header in about:
        text = json.dumps(header).encode()
        yield struct.pack("<Q", len(text)) + text + bytes(16)
    for size in (0, 1, 10**6, 2**62, 2**64 - 1):
        yield struct.pack("<Q", size) + b"{}" + bytes(16)


def _tars() -> Iterator[list[tarfile.TarInfo]]:
    def member(name: str, size: int = 10, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
        about = tarfile.TarInfo(name)
        about.size, about.type, about.linkname = size, kind, link
        return about

    names = [f"{images.CIFAR10_FOLDER}/{name}" for name in images.CIFAR10_FILES]
    yield []
    yield [member("../evil"), *map(member, names)]
    yield [member("/evil")]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
        yield [member(name, 0, kind, "/etc/passwd") for name in names]
    yield [*map(member, names)]
    yield [member(name, 10**15) for name in names]
    yield [member(names[0]) for _ in range(2000)]


def _write_tar(path: Path, members: list[tarfile.TarInfo]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for about in members:
            real = min(about.size, 10)
            about.size, claimed = real, about.size
            tar.addfile(about, io.BytesIO(bytes(real)))
            about.size = claimed


def _parquets(path: Path) -> Iterator[bytes]:
    import pandas as pd

    pd.DataFrame({"a": range(30), "b": ["x"] * 30}).to_parquet(path)
    good = path.read_bytes()
    size = len(good)
    yield b"PAR1" + struct.pack("<I", 2**31 - 1) + b"PAR1"
    yield b"PAR1" + bytes(8) + struct.pack("<I", 10**6) + b"PAR1"
    for footer in (0, 1, size, 2**32 - 1):
        yield good[:-8] + struct.pack("<I", footer) + b"PAR1"
    chance = random.Random(0)
    for _ in range(30):  # the footer, which says what the file holds
        damaged = bytearray(good)
        length = struct.unpack("<I", good[-8:-4])[0]
        start = size - 8 - length
        damaged[start : start + 40] = chance.randbytes(40)
        yield bytes(damaged)


def _npzs(path: Path) -> Iterator[bytes]:
    def archive(**members: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name, content in members.items():
                file.writestr(f"{name}.npy", content)
        return buffer.getvalue()

    def npy(header: str) -> bytes:
        text = header.encode() + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text

    parts = ("x_train", "y_train", "x_test", "y_test")
    yield archive()
    for header in (
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f7', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f8', 'shape': (1,)}",
        "__import__('os').system('touch /tmp/evil')",
        "{" * 5000,
    ):
        yield archive(**dict.fromkeys(parts, npy(header)))
    yield archive(**dict.fromkeys(parts, b""))
    yield archive(x_train=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (0,)}"))


# Numbers.


def network(inputs: int = 3, outputs: int = 2, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), activation(), nn.Linear(8, outputs))


def numbers() -> Counts:
    """Troubled data under every method: each run ends with finite means, or with an error that leaves them finite."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=made)
    trouble = {
        "calm": lambda: x,
        "NaN": lambda: x.clone().index_fill_(0, torch.tensor([3]), math.nan),
        "infinite": lambda: x.clone().index_fill_(0, torch.tensor([3]), math.inf),
        "huge": lambda: x * 1e30,
        "large": lambda: x * 1e6,
        "tiny": lambda: x * 1e-30,
        "denormal": lambda: x * 1e-42,
        "zero": lambda: torch.zeros_like(x),
        "constant": lambda: torch.full_like(x, 1000.0),
        "collinear": lambda: x[:, :1].expand(-1, 3).contiguous(),
        "duplicates": lambda: x[:1].expand(64, -1).contiguous(),
        "one example": lambda: x[:1],
    }
    tried = errors = 0
    for (name, make), method, regression in itertools.product(trouble.items(), METHODS, (False, True)):
        data, model = make(), network(outputs=1 if regression else 2)
        y = data.sum(-1, keepdim=True) if regression else torch.arange(len(data)) % 2
        opt = method(model, num_data=64, likelihood="regression" if regression else "classification", lr=0.1)
        tried += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(30):
                    opt.zero_grad()
                    with opt.sampled_params():
                        opt.likelihood.nll(model(data), y).backward()
                    opt.step()
        except ValueError as error:
            errors += _is_about_numbers(name, error)
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters()), (name, method)
    return {"tried": tried, "survived": tried - errors, "refused": errors}


def _is_about_numbers(name: str, error: Exception) -> bool:
    assert re.search("NaN or infinite|not finite|must be finite|only finite", str(error)), (name, error)
    return True


# Misuses.


def misuses() -> Counts:
    """Things that people do wrong; each is an error with words, before anything changes."""
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    tried = 0
    for number, misuse in enumerate(MISUSES):
        model = network()
        opt = en.NoisyEKFAC(model, num_data=8, likelihood="classification")
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()
        opt.step()
        before = [p.detach().clone() for p in model.parameters()]
        assert refused(lambda misuse=misuse, model=model, opt=opt: misuse(model, opt, x, y)), f"misuse {number}"
        after = list(model.parameters())
        changed = any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(after, before, strict=False))
        assert not changed or number in REPLACING, f"misuse {number} changed the mean"
        tried += 1
    return {"tried": tried, "refused": tried}


def _block(model: nn.Module, opt: en.NoisyEKFAC, x: torch.Tensor, y: torch.Tensor) -> None:
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y).backward()


def _nested(model, opt, x, y):
    with opt.sampled_params(), opt.sampled_params():
        pass


def _step_inside(model, opt, x, y):
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y).backward()
        opt.step()


def _state_inside(model, opt, x, y):
    with opt.sampled_params():
        opt.state_dict()


def _replaced(model, opt, x, y):
    model[0] = nn.Linear(3, 8)
    _block(model, opt, x, y)


def _frozen(model, opt, x, y):
    model[0].weight.requires_grad_(False)
    _block(model, opt, x, y)


def _assigned(model, opt, x, y):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    _block(model, opt, x, y)


def _closed(model, opt, x, y):
    opt.close()
    _block(model, opt, x, y)


def _outside(model, opt, x, y):
    opt.zero_grad()
    opt.likelihood.nll(model(x), y).backward()
    opt.step()


def _closure_after_outside(model, opt, x, y):
    opt.zero_grad()
    opt.likelihood.nll(model(x), y).backward()
    opt.step(lambda: opt.likelihood.nll(model(x), y))


def _build(**options):
    return lambda model, opt, x, y: en.NoisyEKFAC(model, **{"num_data": 8, "likelihood": "classification", **options})


class _Answer(dict):
    """As a Hugging Face model answers."""


class _Answers(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return _Answer(logits=self.model(x))


def _hugging(model, opt, x, y):
    wrapped = _Answers(model)
    en.NoisyEKFAC(wrapped, num_data=8, likelihood="classification").predict(x)


MISUSES: list[Callable[..., object]] = [
    _replaced,
    _frozen,
    _assigned,
    _nested,
    _step_inside,
    _state_inside,
    _closed,
    _outside,
    _closure_after_outside,
    _hugging,
    _build(num_data=0),
    _build(num_data="8"),
    _build(num_data=8.5),
    _build(lr=-1.0),
    _build(lr=math.nan),
    _build(kl_weight=-1.0),
    _build(prior_var=0.0),
    _build(prior_var=1e-30),
    _build(damping=-1.0),
    _build(momentum=1.0),
    _build(ema_factors=0.0),
    _build(ema_scale=1.5),
    _build(stats_every=0),
    _build(refresh_every=-1),
    _build(precision="float8"),
    _build(basis_rank=0.0),
    _build(fisher="true"),
    _build(likelihood="counts"),
    _build(likelihood=None),
    _build(samples=0),
    _build(samples=3, antithetic=True),
    _build(parallel=True),
    _build(others="none"),
    _build(overrides={"nowhere": "point"}),
    _build(generator=1),
    _build(not_finite="ignore"),
    lambda model, opt, x, y: en.NoisyEKFAC(None, num_data=8, likelihood="classification"),
    lambda model, opt, x, y: en.NoisyEKFAC(nn.ReLU(), num_data=8, likelihood="classification"),
    lambda model, opt, x, y: en.NoisyEKFAC(model.half(), num_data=8, likelihood="classification"),
    lambda model, opt, x, y: en.NoisyEKFAC(nn.Linear(3, 2, device="meta"), num_data=8, likelihood="classification"),
    lambda model, opt, x, y: opt.predict(x.numpy()),
    lambda model, opt, x, y: opt.predict(x[:0]),
    lambda model, opt, x, y: opt.predict({"x": x}),
    lambda model, opt, x, y: opt.predict(x, samples=0),
    lambda model, opt, x, y: en.predict(network(), opt, x),
    lambda model, opt, x, y: en.predict(network(4), opt.posterior, x),
    lambda model, opt, x, y: opt.elbo(x[:0], y[:0]),
    lambda model, opt, x, y: opt.likelihood.nll(model(x), y.double()),
    lambda model, opt, x, y: opt.likelihood.nll(model(x), y + 2),
    lambda model, opt, x, y: opt.likelihood.nll(model(x), y[:4]),
    lambda model, opt, x, y: opt.load_state_dict(torch.optim.Adam(model.parameters()).state_dict()),
    lambda model, opt, x, y: opt.load_state_dict(
        en.NoisyAdam(network(), num_data=8, likelihood="classification").state_dict()
    ),
    lambda model, opt, x, y: opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    lambda model, opt, x, y: __import__("copy").deepcopy(opt),
    lambda model, opt, x, y: en.Posterior.load("/nowhere/q"),
]
REPLACING = {0, MISUSES.index(_assigned), 38}  # they change the model themselves


# Processes.


def faults_of_processes() -> Counts:
    """Faults in one of 2 and of 4 processes: all of them stop with an error, none hangs or goes on alone."""
    tried = 0
    for count, fault in itertools.product((2, 4), FAULTS):
        began = time.monotonic()
        found = processes.run(count, _with_fault, fault, seconds=8.0, may_die=True)
        assert time.monotonic() - began < 60, f"{fault} on {count} processes took long"
        for rank, said in enumerate(found):
            assert said is None or said != "went on", f"{fault}: rank {rank} of {count} went on"
        tried += 1
    return {"tried": tried, "refused": tried}


def _with_fault(fault: str) -> str:
    rank = dist.get_rank()
    try:
        _train_with(fault, rank == dist.get_world_size() - 1)
    except Exception as error:
        _says_something(error)
        return f"{type(error).__name__}: {error}"
    return "went on"


FAULTS = (
    "killed",
    "killed within a block",
    "leaves early",
    "raises",
    "stalls",
    "NaN",
    "infinite",
    "empty batch",
    "another lr",
    "another num_data",
    "another step",
    "other weights",
    "Join",
    "the bare model",
    "another state",
    "another method's state",
)


def _train_with(fault: str, faulty: bool) -> None:
    model = DistributedDataParallel(network())
    opt = en.NoisyEKFAC(model.module if fault == "the bare model" else model, num_data=64, likelihood="classification")
    x, y = torch.randn(16, 3), torch.arange(16) % 2
    if fault == "Join":
        model.join()
    for i in range(6):
        opt.zero_grad()
        if faulty and i == 3:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "leaves early":
                raise SystemError("this process leaves before the others")
            if fault == "stalls":
                time.sleep(20)
            if fault in ("NaN", "infinite"):
                x = x * math.inf if fault == "infinite" else x * math.nan
            if fault == "empty batch":
                x, y = x[:0], y[:0]
            if fault.startswith("another lr"):
                opt.param_groups[0]["lr"] = 0.5
            if fault == "another num_data":
                opt.param_groups[0]["num_data"] = 32
            if fault == "another step":
                opt.steps = 50
            if fault == "other weights":
                opt.load_state_dict(opt.state_dict())
                model.module.load_state_dict(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).state_dict())
            if fault == "another state":
                opt.load_state_dict({**opt.state_dict(), "eigenoise": {}})
            if fault == "another method's state":
                opt.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
        with opt.sampled_params():
            if faulty and i == 3 and fault == "killed within a block":
                os.kill(os.getpid(), signal.SIGKILL)
            if faulty and i == 3 and fault == "raises":
                raise ValueError("something of the user's own went wrong")
            opt.likelihood.nll(model(x), y).backward()
        opt.step()


# Kills.


COMMANDS = {
    "uci": "uci boston --method noisy-ekfac --preset paper --splits 2 --epochs 12 --quiet",
    "uci, two methods": "uci yacht --method noisy-kfac,bbb --preset paper --splits 2 --epochs 12 --quiet",
    "fit": "fit TABLE --target y --out OUT/m.model --quiet",
    "bench": "bench a --no-peers --no-memory --rounds 1 --out OUT --quiet",
    "cifar10": "cifar10 --method noisy-ekfac --train-size 64 --batch-size 16 --steps 12 --samples 1 --width 0.125 "
    "--resume --quiet --data DATA",
}


def kills(name: str, data: Path | None, count: int) -> Counts:
    """SIGKILL at random moments of a long command, which is started again; in the end all is as if it never was."""
    for module in SLOW_IMPORTS:  # once, for all forks
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        return _killed(COMMANDS[name].replace("DATA", str(data)).split(), Path(folder), count)


def _killed(command: list[str], folder: Path, count: int) -> Counts:
    table = folder / "t.csv"
    x = np.random.default_rng(0).normal(size=(60, 3))
    table.write_text("a,b,y\n" + "\n".join(f"{a},{b},{a + 0.1 * c}" for a, b, c in x))
    outs = {name: folder / name for name in ("straight", "broken")}
    chance, tried, halves = random.Random(0), 0, 0
    began = time.monotonic()
    assert _run(command, table, outs["straight"]).wait() == 0
    whole = time.monotonic() - began
    print(f"  {' '.join(command)}: {whole:.1f} s in peace", flush=True)
    while tried < count:
        process = _run(command, table, outs["broken"])
        time.sleep(chance.uniform(0, 1.2 * whole))
        killed = process.kill()
        tried += killed
        if killed:
            halves += any(
                path.name.startswith(".") and re.search(r"\.\w{8}$", path.name) for path in _files(outs["broken"])
            )
        else:  # it was done: begin again
            _empty(outs["broken"])
    assert _run(command, table, outs["broken"]).wait() == 0, "a run that was killed did not get to its end"
    names = [{path.name for path in _files(out) if path.suffix != ".svg"} for out in outs.values()]
    assert names[0] == names[1], f"other files than those of a run in peace: {names[0] ^ names[1]}"
    for name in names[0]:
        _compare(*(out / name for out in outs.values()))
    return {"tried": tried, "left half a file": halves, "survived": tried}


class _run:  # noqa: N801
    """A command in a forked process that writes slowly, so that it is often killed in the middle of a file."""

    def __init__(self, command: list[str], table: Path, out: Path):
        out.mkdir(exist_ok=True)
        words = [word.replace("TABLE", str(table)).replace("OUT", str(out)) for word in command]
        words += [] if "--out" in words else ["--out", str(out)]
        self.child = os.fork()
        if self.child:
            return
        status = 1
        try:
            torch.set_num_threads(1)
            Run.SAVE_SECONDS = 0.0
            storage._sync = lambda path, mode: time.sleep(0.02)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            app(words, standalone_mode=False)
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        finally:
            os._exit(status)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])

    def kill(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        status = self.wait()
        assert status in (0, -signal.SIGKILL), f"a command that went on failed with {status}"
        return status != 0


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _empty(folder: Path) -> None:
    for path in _files(folder):
        path.unlink()


def _compare(straight: Path, broken: Path) -> None:
    """Results are the same but for times."""
    if straight.suffix == ".json" and straight.name != "bench.json":
        results = [json.loads(path.read_text()) for path in (straight, broken)]
        for result in results:
            result.pop("seconds", None)
        assert results[0] == results[1], f"{straight.name} is another after kills"
    if straight.suffix == ".model":
        persistence.load(broken)


SLOW_IMPORTS = (
    "matplotlib.pyplot",
    "pandas",
    "rich.progress",
    "sklearn.ensemble",
    "sympy",
    "torch._dynamo",
    "eigenoise.studies.bench.run",
    "eigenoise.studies.classification.report",
    "eigenoise.studies.regression.report",
    "eigenoise.tabular.learning",
)
PARTS = {
    "flips": flips,
    "hostile": hostile,
    "numbers": numbers,
    "misuses": misuses,
    "processes": faults_of_processes,
}


def table(results: dict) -> str:
    """The counts in Markdown."""
    rows = ["| what | tried | survived | refused | half a file left |", "|---|---|---|---|---|"]
    for name, counts in sorted(results["parts"].items()):
        cells = [str(counts.get(key, "")) for key in ("tried", "survived", "refused", "left half a file")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "kills"], default=[*PARTS, "kills"])
    parser.add_argument("--command", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=65, help="of each command")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = {part: PARTS[part] for part in args.part if part != "kills"}
    if "kills" in args.part:
        commands = [name for name in args.command if name != "cifar10" or args.data is not None]
        work |= {f"kills of {name}": functools.partial(kills, name, args.data, args.kills) for name in commands}
    for name, count in {} if args.show else work.items():
        counts = count()
        print(name, counts, flush=True)
        parts = json.loads(OUT.read_text())["parts"] if OUT.exists() else {}  # another process may have written
        storage.write_json(OUT, {"parts": {**parts, name: counts}, "environment": environment()})
    print(table(json.loads(OUT.read_text())), end="")


if __name__ == "__main__":
    main()

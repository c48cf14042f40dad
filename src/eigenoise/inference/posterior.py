"""q over all weights of a model: sample, mean, KL, save and load."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from eigenoise import checks, likelihoods, storage
from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.inference.batch_norm import SampleAverages, batch_norms, settling
from eigenoise.inference.turns import PATIENCE, exclusive
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer
from eigenoise.version import __version__

FORMAT = 2
LIKELIHOODS = tuple(name for name in likelihoods.__all__ if name != "Likelihood")
KINDS = {
    "eigen": ("loc", "q_out", "q_in", "variance"),
    "matrix": ("loc", "cov_out", "cov_in"),
    "diagonal": ("loc", "stddev"),
}


@dataclass(frozen=True)
class Entry:
    """One layer's distribution and the parameters it fills: the weight and, as last column, perhaps the bias."""

    distribution: Distribution
    params: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape), weight first
    stack: int | None = None  # the number of models if the leading axis counts models

    @classmethod
    def of(cls, distribution: Distribution, layer: MatrixLayer | BareParameter) -> Entry:
        """The entry that fills the parameters of ``layer``."""
        shapes = tuple((name, tuple(p.shape)) for name, p in zip(layer.param_names, layer.params, strict=True))
        return cls(distribution, shapes, layer.stack)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        """The matrix ``(..., p, n)`` as parameters by name."""
        parts = [matrix] if len(self.params) == 1 else [matrix[..., :-1], matrix[..., -1]]
        return {name: part.reshape(shape) for (name, shape), part in zip(self.params, parts, strict=True)}

    def draw(self, generator: torch.Generator | None) -> Tensor:
        """One sample of the matrix."""
        q = self.distribution
        device = q.mean.device if generator is None else generator.device
        noise = torch.randn(q.mean.shape, generator=generator, dtype=q.mean.dtype, device=device).to(q.mean.device)
        if isinstance(q, (EigenMatrixNormal, MatrixNormal)):
            return q.from_standard(noise)
        return q.mean + q.stddev * noise


class Posterior(Mapping[str, Distribution]):
    """A Gaussian posterior over the weights of a model, layer by layer.

    ``posterior["layer.name"]`` is that layer's distribution over its ``(p, n)`` matrix, the bias as last column; for
    parameters outside a layer the name is the parameter's and the shape its own.

    Args:
        entries: layer or parameter name to entry.
        rest: everything else of the model's state dict: point estimates, frozen parameters, buffers.
        likelihood: what the outputs mean; carried along so that a loaded posterior can predict.
        notes: anything that JSON knows, carried along.

    Attributes:
        batch_norm: batch norm's averages for each weight sample, if ``settle_batch_norm`` was called.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        rest: Mapping[str, Tensor],
        likelihood: likelihoods.Likelihood | None = None,
        notes: Any = None,
    ):
        self.entries = dict(entries)
        self.rest = dict(rest)
        self.likelihood = likelihood
        self.notes = notes
        self.batch_norm: SampleAverages | None = None

    @classmethod
    def of(
        cls, model: nn.Module, entries: Mapping[str, Entry], likelihood: likelihoods.Likelihood | None = None
    ) -> Posterior:
        """A posterior whose rest is the state of ``model`` that ``entries`` do not fill, copied."""
        filled = {name for entry in entries.values() for name, _ in entry.params}
        state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
        rest = {k: v.detach().clone() for k, v in state.items() if k not in filled}
        return cls(entries, rest, likelihood)

    def __getitem__(self, name: str) -> Distribution:
        if name not in self.entries:
            known = ", ".join(repr(n) for n in self.entries)
            raise KeyError(f"no posterior for {name!r}; there is one for {known}")
        return self.entries[name].distribution

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        lines = [f"  {name}: {type(q).__name__}{tuple(q.mean.shape)}" for name, q in self.items()]
        return "\n".join(["Posterior(", *lines, ")"])

    @property
    def mean(self) -> dict[str, Tensor]:
        """Posterior means by parameter name."""
        return {k: v for entry in self.entries.values() for k, v in entry.unpack(entry.distribution.mean).items()}

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """One draw of all weights, by parameter name."""
        return {k: v for entry in self.entries.values() for k, v in entry.unpack(entry.draw(generator)).items()}

    def kl(self, prior_var: float | Mapping[str, float]) -> Tensor:
        """KL(q ‖ N(0, ηI)), all layers together; ``(s,)`` for a stack of models.

        Args:
            prior_var: η of all layers, or of each by its name, as the optimiser's ``prior_vars`` has them.

        Raises:
            ValueError: if η is not positive, or a layer has none.
        """
        kls = []
        for name, entry in self.entries.items():
            q = entry.distribution
            variance = _prior_var(prior_var, name)
            prior = Independent(Normal(torch.zeros_like(q.mean), variance**0.5), len(q.event_shape))
            kls.append((entry.stack, kl_divergence(q, prior)))
        return total_kl(kls, max((stack or 1 for stack, _ in kls), default=1))

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` holds the means and the rest; afterwards what it held before.

        Raises:
            ValueError: if the model does not have these parameters and buffers in these shapes.
        """
        with _written(model, self._whole(model)):
            yield

    @contextmanager
    def sampled_params(self, model: nn.Module, generator: torch.Generator | None = None) -> Iterator[None]:
        """Within the block ``model`` holds weights W ~ q; afterwards what it held before."""
        with _written(model, self.sample(generator)):
            yield

    def settle_batch_norm(self, model: nn.Module, batches: Any, samples: int = 32) -> None:
        """Keep batch norm's averages for each of the first weight samples, so that predictions need no training data.

        Args:
            model: the model of this posterior; it is left as it was.
            batches: training batches, of which the first 8 are used.
            samples: predictions can use that many weight samples.

        Raises:
            ValueError: if the model has no batch norm.
        """
        checks.integer("samples", samples)
        names = [f"{name}.{key}".lstrip(".") for name, m in batch_norms(model).items() for key, _ in m.named_buffers()]
        if not names:
            raise ValueError("model must have batch norm that keeps running averages, got none")
        generator, drawn = SampleAverages.generator(), []
        with exclusive(model), self.installed(model), settling(model, batches) as settle:
            for _ in range(samples):
                with self.sampled_params(model, generator):
                    settle()
                    own = dict(model.named_buffers())
                    drawn.append([own[name].clone() for name in names])
        columns = zip(*drawn, strict=True)
        self.batch_norm = SampleAverages({name: torch.stack(c) for name, c in zip(names, columns, strict=True)})

    def load_into(self, model: nn.Module) -> None:
        """Write the means and the rest into ``model`` for good."""
        values = self._whole(model)
        targets = _targets(model, values)
        with torch.no_grad():
            for name, value in values.items():
                targets[name].copy_(value)

    def _whole(self, model: nn.Module) -> dict[str, Tensor]:
        """Means and rest, which must be all the parameters that ``model`` has."""
        values = {**self.rest, **self.mean}
        _targets(model, values)
        missing = [name for name, _ in model.named_parameters() if name not in values]
        if missing:
            raise ValueError(f"the model has a parameter {missing[0]!r} that this posterior does not hold")
        return values

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file with JSON metadata; the file appears only when it is complete."""
        from safetensors.torch import save_file

        tensors, layout = {}, {}
        for name, entry in self.entries.items():
            kind, parts, event_dims = _dismantle(entry.distribution)
            layout[name] = {"kind": kind, "params": entry.params, "event_dims": event_dims, "stack": entry.stack}
            tensors.update({f"q/{name}/{part}": t.detach().cpu().contiguous() for part, t in parts.items()})
        tensors.update({f"rest/{name}": t.detach().cpu().contiguous().clone() for name, t in self.rest.items()})
        if self.batch_norm is not None:
            buffers = self.batch_norm.buffers.items()
            tensors.update({f"batch_norm/{name}": t.detach().cpu().contiguous() for name, t in buffers})
        meta: dict[str, Any] = {"format": FORMAT, "eigenoise": __version__, "layout": layout, "likelihood": None}
        meta["notes"] = self.notes
        if self.likelihood is not None:
            checks.choice("the likelihood", type(self.likelihood).__name__, LIKELIHOODS)
            meta["likelihood"] = {"kind": type(self.likelihood).__name__, "config": self.likelihood.config()}
            state = self.likelihood.state_dict()
            tensors.update({f"likelihood/{name}": t.detach().cpu().contiguous() for name, t in state.items()})
        text = json.dumps(meta)
        content = {name: tensor.clone() for name, tensor in tensors.items()}
        about = {"eigenoise": text, "sha256": _digest(text, content)}
        storage.write(path, lambda temporary: save_file(content, temporary, about))

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> Posterior:
        """Read what ``save`` wrote. The file holds numbers and JSON only: nothing in it can run.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is damaged or no posterior.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no posterior file at {path}")
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                about = file.metadata() or {}
                meta = json.loads(about["eigenoise"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if type(meta["format"]) is not int or meta["format"] != FORMAT:
                raise ValueError(f"its format is {meta['format']!r}, this version reads {FORMAT}")
            if _digest(about["eigenoise"], tensors) != about["sha256"]:
                raise ValueError("its content does not match its checksum: the file was damaged or changed")
            return _assemble(meta, tensors)
        except (
            SafetensorError,
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            RuntimeError,
            RecursionError,
        ) as error:
            raise ValueError(f"{path} is not a posterior that this version can read: {error}") from error


def _prior_var(prior_var: float | Mapping[str, float], name: str) -> float:
    if not isinstance(prior_var, Mapping):
        return checks.number("prior_var", prior_var, open_low=True)
    if name not in prior_var:
        raise ValueError(f"prior_var must have a variance for every layer, got none for {name!r}")
    return checks.number(f"prior_var[{name!r}]", prior_var[name], open_low=True)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the metadata and of the names, kinds and bytes of all tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def _dismantle(q: Distribution) -> tuple[str, dict[str, Tensor], int]:
    if isinstance(q, EigenMatrixNormal):
        return "eigen", {"loc": q.loc, "q_out": q.q_out, "q_in": q.q_in, "variance": q.eigen_variance}, 2
    if isinstance(q, MatrixNormal):
        return "matrix", {"loc": q.loc, "cov_out": q.cov_out, "cov_in": q.cov_in}, 2
    return "diagonal", {"loc": q.mean, "stddev": q.stddev}, len(q.event_shape)


def _assemble(meta: dict, tensors: dict[str, Tensor]) -> Posterior:
    entries = {}
    for name, about in meta["layout"].items():
        _check_layout(name, about)
        part = {part: tensors[f"q/{name}/{part}"] for part in KINDS[about["kind"]]}
        q: Distribution  # checked always: compiling a model turns torch's own default off
        if about["kind"] == "eigen":
            q = EigenMatrixNormal(part["loc"], part["q_out"], part["q_in"], part["variance"], validate_args=True)
        elif about["kind"] == "matrix":
            q = MatrixNormal(part["loc"], part["cov_out"], part["cov_in"], validate_args=True)
        else:
            q = Independent(Normal(part["loc"], part["stddev"], validate_args=True), about["event_dims"])
        params = tuple((param, tuple(shape)) for param, shape in about["params"])
        columns = [q.mean.numel()]
        if len(params) == 2:  # the bias is the last column
            columns = [q.mean[..., :-1].numel(), q.mean[..., -1].numel()]
        if [math.prod(shape) for _, shape in params] != columns:
            raise ValueError(f"the parts of {name!r} do not fit its matrix")
        if about["stack"] is not None and about["stack"] != q.mean.shape[0]:
            raise ValueError(f"{name!r} is a stack of {about['stack']} models, but its matrix is {tuple(q.mean.shape)}")
        entries[name] = Entry(q, params, about["stack"])
    rest = {k.removeprefix("rest/"): t for k, t in tensors.items() if k.startswith("rest/")}
    likelihood = None
    if meta["likelihood"] is not None:
        kind = meta["likelihood"]["kind"]
        checks.choice("the likelihood", kind, LIKELIHOODS)
        stack = meta["likelihood"]["config"].get("stack")
        if stack is not None and all(entry.stack != stack for entry in entries.values()):
            raise ValueError(f"its likelihood is of a stack of {stack!r} models, its weights are not")
        likelihood = getattr(likelihoods, kind)(**meta["likelihood"]["config"])
        prefix = "likelihood/"
        likelihood.load_state_dict({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
    posterior = Posterior(entries, rest, likelihood, meta.get("notes"))
    averages = {k.removeprefix("batch_norm/"): t for k, t in tensors.items() if k.startswith("batch_norm/")}
    if averages:
        if not set(averages) <= set(rest) or len({len(t) for t in averages.values()}) != 1:
            raise ValueError("its averages of batch norm do not fit its buffers")
        posterior.batch_norm = SampleAverages(averages)
    return posterior


def _check_layout(name: str, about: Mapping[str, Any]) -> None:
    """Raise ValueError unless stack, axes and shapes are whole numbers that can be meant."""
    sizes = [*([] if about["stack"] is None else [about["stack"]])]
    sizes += [size for _, shape in about["params"] for size in shape]
    if not 1 <= len(about["params"]) <= 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"the shapes of {name!r} must be whole numbers from 1 on, got {about['params']}")
    if type(about["event_dims"]) is not int or about["event_dims"] < 0:
        raise ValueError(f"event_dims of {name!r} must be a whole number, got {about['event_dims']!r}")


def _targets(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own tensors for ``values``, checked before anything is written."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if name not in own:
            raise ValueError(f"the posterior holds {name!r}, but the model has no such parameter or buffer")
        checks.shape(f"the model's {name!r}", own[name], tuple(value.shape), "is it the model of this posterior?")
    return {name: own[name] for name in values}


@contextmanager
def _written(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    targets = _targets(model, values)
    with exclusive(model, PATIENCE):
        before = {name: target.detach().clone() for name, target in targets.items()}
        try:
            with torch.no_grad():
                for name, target in targets.items():
                    target.copy_(values[name])
            yield
        finally:
            with torch.no_grad():
                for name, target in targets.items():
                    target.copy_(before[name])


def total_kl(kls: Sequence[tuple[int | None, Tensor]], models: int, device: torch.device | None = None) -> Tensor:
    """Sum of layers' KLs ``(...)``, each with the number of models in its stack or None; ``(s,)`` for a stack.

    What all ``models`` share is divided between them, so that the sum over models is the whole.
    """
    total = torch.zeros((), device=device)
    for stack, kl in kls:
        total = total + (kl.sum() / models if stack is None else kl)
    return total

"""What trains in the arena: one interface, ours at their defaults and those of others as their authors use them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

import eigenoise as en
from eigenoise.distributions.mixtures import CategoricalMixture, GaussianMixture
from eigenoise.studies.arena.tasks import Parts, Task

SAMPLES = 32  # of the weights, of masks or of SWAG, for predictions
BATCH_NORM_BATCHES = 4
Mixture = CategoricalMixture | GaussianMixture


class Learner(Protocol):
    """A model in training."""

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Makes a step; ``progress`` is the part of the time that is spent, for schedules."""

    def predict(self, x: Tensor) -> Mixture:
        """Predicts from the current state."""


Make = Callable[[Task, Parts, dict[str, Any]], Learner]


@dataclass(frozen=True)
class Method:
    """One contender.

    Attributes:
        label: for tables.
        make: builds a learner, given a task, its rows and a setting.
        settings: what it may choose from on validation rows; one setting is none to choose.
        settings_of: a method whose chosen setting it takes over instead.
        finish: changes a trained learner with the help of validation rows, beside the clock.
    """

    label: str
    make: Make
    settings: tuple[dict[str, Any], ...] = ({},)
    settings_of: str | None = None
    finish: Callable[[Learner, Task, Parts], Learner] | None = None


# Ours.


class Ours:
    """One of our optimisers with nothing but ``num_data`` and ``likelihood``, and what ``options`` say."""

    def __init__(self, method: Any, task: Task, parts: Parts, options: dict[str, Any]):
        self.model, self.parts = task.network(), parts
        self.likelihood = en.CategoricalLikelihood() if task.classes else en.GaussianLikelihood()
        self.optimizer = method(self.model, num_data=len(parts.x), likelihood=self.likelihood, **options)
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules())

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Makes a step."""
        self.model.train()
        with self.optimizer.sampled_params():
            self.optimizer.zero_grad()
            self.likelihood.nll(self.model(x), y).backward()
        self.optimizer.step()

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by weight samples."""
        self.model.eval()
        batches = list(self.parts.x.split(128)[:BATCH_NORM_BATCHES]) if self.has_batch_norm else None
        generator = torch.Generator().manual_seed(0)
        return en.predict(self.model, self.optimizer, x, samples=SAMPLES, batch_norm=batches, generator=generator)  # type: ignore[return-value]


def _ours(method: Any) -> Make:
    return lambda task, parts, options: Ours(method, task, parts, options)


# Others.


class Point(nn.Module):
    """A network of point weights and, for numbers, the logarithm of one noise precision."""

    def __init__(self, task: Task):
        super().__init__()
        self.network, self.classes = task.network(), task.classes
        self.log_tau = nn.Parameter(torch.zeros(()), requires_grad=not task.classes)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean negative log-likelihood."""
        f = self.network(x)
        if self.classes:
            return functional.cross_entropy(f, y)
        squares = (f - y).square().sum(-1).mean()
        return 0.5 * (self.log_tau.exp() * squares - y.shape[-1] * (self.log_tau - math.log(2 * math.pi)))

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Returns the network's outputs for all rows."""
        return torch.cat([self.network(part) for part in x.split(1000)])

    def mixture(self, outputs: Tensor, scale: Tensor | None = None) -> Mixture:
        """Returns the predictive mixture of ``outputs (k, b, d)``."""
        if self.classes:
            return CategoricalMixture(outputs)
        noise = (-0.5 * self.log_tau.detach()).exp() if scale is None else scale
        return GaussianMixture(outputs, noise.reshape(-1, 1, 1))


@dataclass
class Descent:
    """Training by any torch optimiser with a cosine schedule."""

    point: Point
    optimizer: torch.optim.Optimizer
    lr: float
    temperature: float = 1.0  # of logits, or of the noise's variance
    snapshots: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Makes a step."""
        self.point.train()
        self.optimizer.param_groups[0]["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        self.optimizer.zero_grad()
        self.point.loss(x, y).backward()
        self.optimizer.step()

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by the weights."""
        self.point.eval()
        f = self.point.outputs(x).unsqueeze(0)
        if self.point.classes:
            return CategoricalMixture(f / self.temperature)
        return self.point.mixture(f, (-0.5 * self.point.log_tau.detach()).exp() * self.temperature**0.5)


def _adamw(task: Task, parts: Parts, setting: dict[str, Any]) -> Descent:
    point = Point(task)
    return Descent(point, torch.optim.AdamW(point.parameters(), **setting), setting["lr"])


def _sgd(task: Task, parts: Parts, setting: dict[str, Any]) -> Descent:
    point = Point(task)
    return Descent(point, torch.optim.SGD(point.parameters(), momentum=0.9, **setting), setting["lr"])


def _with_temperature(learner: Learner, task: Task, parts: Parts) -> Learner:
    """Chooses the temperature that makes validation rows most likely."""
    assert isinstance(learner, Descent)
    scores = {}
    for temperature in torch.logspace(-0.5, 1.0, 61).tolist():
        learner.temperature = temperature
        scores[temperature] = float(learner.predict(parts.x_validation).log_prob(parts.y_validation).mean())
    learner.temperature = max(scores, key=lambda t: scores[t])
    return learner


class Ivon:
    """IVON (ivon-opt), one sample a step, cosine schedule."""

    def __init__(self, task: Task, parts: Parts, setting: dict[str, Any]):
        import ivon

        self.point, self.lr = Point(task), setting["lr"]
        self.optimizer = ivon.IVON(self.point.parameters(), ess=len(parts.x), **setting)

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Makes a step."""
        self.point.train()
        self.optimizer.param_groups[0]["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        with self.optimizer.sampled_params(train=True):
            self.optimizer.zero_grad()
            self.point.loss(x, y).backward()
        self.optimizer.step()

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by weight samples."""
        self.point.eval()
        outputs, scales = [], []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for _ in range(SAMPLES):
                with self.optimizer.sampled_params():
                    outputs.append(self.point.outputs(x))
                    scales.append((-0.5 * self.point.log_tau.detach()).exp())
        return self.point.mixture(torch.stack(outputs), torch.stack(scales))


class Dropout(Descent):
    """MC dropout: AdamW with dropout after each activation, in training and in predictions."""

    def __init__(self, descent: Descent, rate: float):
        super().__init__(descent.point, descent.optimizer, descent.lr)
        for module in self.point.modules():
            if isinstance(module, (nn.ReLU, nn.GELU)):
                module.register_forward_hook(
                    lambda module, inputs, output: functional.dropout(output, rate, training=True)
                )

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by masks."""
        self.point.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.point.mixture(torch.stack([self.point.outputs(x) for _ in range(SAMPLES)]))


def _dropout(task: Task, parts: Parts, setting: dict[str, Any]) -> Dropout:
    own = dict(setting)
    return Dropout(_adamw(task, parts, {k: v for k, v in own.items() if k != "rate"}), own.get("rate", 0.1))


class Swag(Descent):
    """SWAG with a diagonal: AdamW at half its rate for the last quarter of the time, whose weights are a Gaussian."""

    START = 0.75

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Makes a step, and a snapshot now and then."""
        super().step(x, y, min(progress, self.START))
        if progress >= self.START and progress >= self.START + 0.01 * len(self.snapshots):
            weights = nn.utils.parameters_to_vector(self.point.parameters()).detach()
            self.snapshots.append((weights, weights.square()))

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by weight samples."""
        self.point.eval()
        if not self.snapshots:
            return super().predict(x)
        mean, square = (torch.stack(part).mean(0) for part in zip(*self.snapshots, strict=True))
        std, now = (square - mean.square()).clamp_min(0).sqrt(), nn.utils.parameters_to_vector(self.point.parameters())
        generator = torch.Generator().manual_seed(0)
        outputs = []
        for _ in range(SAMPLES):
            sample = mean + 0.5**0.5 * std * torch.randn(mean.shape, generator=generator)
            nn.utils.vector_to_parameters(sample, self.point.parameters())
            outputs.append(self.point.outputs(x))
        nn.utils.vector_to_parameters(now.detach(), self.point.parameters())
        return self.point.mixture(torch.stack(outputs))


def _swag(task: Task, parts: Parts, setting: dict[str, Any]) -> Swag:
    descent = _adamw(task, parts, setting)
    return Swag(descent.point, descent.optimizer, descent.lr)


class Ensemble:
    """Networks that share the time."""

    def __init__(self, members: list[Descent]):
        self.members = members

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Makes a step of the member whose turn it is."""
        turn = min(len(self.members) - 1, int(progress * len(self.members)))
        self.members[turn].step(x, y, progress * len(self.members) - turn)

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by all members."""
        for member in self.members:
            member.point.eval()
        outputs = torch.stack([member.point.outputs(x) for member in self.members])
        scales = torch.stack([(-0.5 * member.point.log_tau.detach()).exp() for member in self.members])
        return self.members[0].point.mixture(outputs, scales)


def _ensemble(task: Task, parts: Parts, setting: dict[str, Any]) -> Ensemble:
    return Ensemble([_adamw(task, parts, setting) for _ in range(3)])


@dataclass
class Laplaced:
    """laplace-torch's Laplace approximation around a trained network."""

    laplace: Any
    classes: bool

    def step(self, x: Tensor, y: Tensor, progress: float) -> None:
        """Refuses: it is done."""
        raise RuntimeError("a Laplace approximation does not train")

    def predict(self, x: Tensor) -> Mixture:
        """Predicts by linearised outputs: probit for classes."""
        if self.classes:
            probs = torch.cat([self.laplace(part, link_approx="probit") for part in x.split(500)])
            return CategoricalMixture(probs.detach().clamp_min(1e-12).log().unsqueeze(0))
        parts = [self.laplace(part) for part in x.split(500)]
        mean = torch.cat([part[0] for part in parts]).detach()
        variance = torch.cat([part[1].reshape(len(part[1]), -1) for part in parts]).detach()
        noise = self.laplace.sigma_noise.detach().reshape(-1) ** 2
        return GaussianMixture(mean.unsqueeze(0), (variance + noise).sqrt().unsqueeze(0))


def _laplace(which: str) -> Callable[[Learner, Task, Parts], Learner]:
    def fit(learner: Learner, task: Task, parts: Parts) -> Learner:
        from laplace import Laplace
        from torch.utils.data import DataLoader, TensorDataset

        assert isinstance(learner, Descent)
        model = copy.deepcopy(learner.point.network).eval()
        kind = "classification" if task.classes else "regression"
        noise: dict[str, Any] = (
            {} if task.classes else {"sigma_noise": float((-0.5 * learner.point.log_tau.detach()).exp())}
        )
        laplace = Laplace(model, kind, subset_of_weights=which, hessian_structure="kron", **noise)
        laplace.fit(DataLoader(TensorDataset(parts.x, parts.y), batch_size=128))
        laplace.optimize_prior_precision(method="marglik", pred_type="glm")
        return Laplaced(laplace, task.classes)

    return fit


ADAMW = tuple({"lr": lr, "weight_decay": decay} for lr in (3e-4, 1e-3, 3e-3) for decay in (0.01, 0.3))
SGD = tuple({"lr": lr, "weight_decay": decay} for lr in (0.01, 0.03, 0.1) for decay in (1e-4, 5e-3))
IVON = tuple({"lr": lr, "hess_init": start, "weight_decay": 1e-4} for lr in (0.03, 0.1, 0.3) for start in (0.1, 1.0))
FRESH = {"refresh_every": 10}  # decompositions as often as statistics, so as fresh as noisy EK-FAC's R

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "noisy-ekfac": Method("noisy EK-FAC", _ours(en.NoisyEKFAC)),
        "noisy-kfac": Method("noisy K-FAC", _ours(en.NoisyKFAC), (FRESH,)),
        "noisy-kfac-factored": Method(
            "noisy K-FAC, factored damping", _ours(en.NoisyKFAC), ({**FRESH, "damping_form": "factored"},)
        ),
        "noisy-adam": Method("noisy Adam", _ours(en.NoisyAdam)),
        "bbb": Method("BBB", _ours(en.BayesByBackprop)),
        "ekfac": Method("EK-FAC", _ours(en.EKFAC)),
        "adamw": Method("AdamW", _adamw, ADAMW),
        "adamw-temperature": Method("AdamW + temperature", _adamw, settings_of="adamw", finish=_with_temperature),
        "sgd": Method("SGD", _sgd, SGD),
        "ivon": Method("IVON", Ivon, IVON),
        "ensemble": Method("ensemble of 3", _ensemble, settings_of="adamw"),
        "dropout": Method("MC dropout", _dropout, settings_of="adamw"),
        "swag": Method("SWAG", _swag, settings_of="adamw"),
        "laplace": Method("Laplace, last layer", _adamw, settings_of="adamw", finish=_laplace("last_layer")),
        "laplace-all": Method("Laplace, all layers", _adamw, settings_of="adamw", finish=_laplace("all")),
    }
)
OURS = ("noisy-ekfac", "noisy-kfac", "noisy-kfac-factored", "noisy-adam", "bbb", "ekfac")

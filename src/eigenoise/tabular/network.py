"""Networks for a table: a stack of them trained at once, and what is chosen on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from eigenoise import checks, models
from eigenoise.distributions.mixtures import CategoricalMixture, GaussianMixture, Predictive
from eigenoise.inference.predict import predict
from eigenoise.likelihoods import CategoricalLikelihood, GaussianLikelihood, Likelihood
from eigenoise.optim import training
from eigenoise.optim.methods import BAYESIAN
from eigenoise.tabular.calibration import Calibration
from eigenoise.tabular.rows import Rows, one_pass, parts

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "silu": nn.SiLU, "gelu": nn.GELU}
)
PAIRS = ((1.0, 0.1), (0.3, 0.3), (0.1, 1.0))  # λ and η: from tables that say little to those that say much
FACTORS = tuple(2 ** (i / 4) for i in range(-8, 9))  # on the noise's standard deviation
STEPS = 6_000  # of a whole training, if the number of passes is not given
CHECKS = 40  # how often held-out rows are looked at in it
TRIAL_SAMPLES = 16  # of weights, when they are

AS_THEY_ARE = (
    "warm_start goes on with networks as they are: hidden_layer_sizes, members and the columns of X and y must be "
    "those of the fit before"
)

Progress = Callable[[str, float], None]  # what is being done, and which part of it is done


@dataclass(frozen=True)
class Plan:
    """All of a training but what held-out rows may decide.

    Attributes:
        activation: one of ``ACTIVATIONS``.
        method: one of ``BAYESIAN``.
        outputs: of the network.
        classes: whether they are logits of classes.
        lr: step size.
        batch_size: rows of a step.
        seed: of initial weights, noise, order and divisions.
    """

    activation: str
    method: str
    outputs: int
    classes: bool
    lr: float
    batch_size: int
    seed: int

    def likelihood(self, stack: int) -> Likelihood:
        """Of ``stack`` networks."""
        return CategoricalLikelihood(stack=stack) if self.classes else GaussianLikelihood(stack=stack)

    def model(self, inputs: int, hidden: tuple[int, ...], stack: int) -> nn.Module:
        """``stack`` networks with their initial weights, in float64."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            activation = ACTIVATIONS[self.activation]
            return models.MLP(inputs, hidden, self.outputs, stack=stack, activation=activation).double()


@dataclass(frozen=True)
class Candidate:
    """What may be tried on held-out rows.

    Attributes:
        hidden: sizes of the hidden layers.
        kl_weight: λ.
        prior_var: η.
    """

    hidden: tuple[int, ...]
    kl_weight: float
    prior_var: float

    def __str__(self) -> str:
        """In a few words."""
        return f"{'' if self.hidden else 'linear, '}λ = {self.kl_weight:g}, η = {self.prior_var:g}"


def candidates(hidden: tuple[int, ...], kl_weight: float | None, prior_var: float | None) -> list[Candidate]:
    """What is to be tried, the simplest first: if λ and η are both open, a linear model comes before networks."""
    linear = [Candidate((), 1.0, 1.0)] if kl_weight is None and prior_var is None else []
    return linear + list(
        dict.fromkeys(Candidate(hidden, float(kl_weight or a), float(prior_var or b)) for a, b in PAIRS)
    )


@dataclass(frozen=True)
class Choice:
    """What held-out rows decide.

    Attributes:
        candidate: the best of those tried.
        epochs: passes over the rows.
        noise: factor on the noise's standard deviation for each target ``(d,)``; of no meaning for classes.
        calibration: of intervals, after that; neither.
        log_likelihood: of a held-out row, or NaN if there was none.
        each: the same for every held-out row.
        weight: of those rows: how many observations each is.
    """

    candidate: Candidate
    epochs: int
    noise: Tensor
    calibration: Calibration
    log_likelihood: float = float("nan")
    each: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)
    weight: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    def clearly_better_than(self, other: Choice) -> bool:
        """By more than two standard errors of the difference, row by row; one row alone says nothing."""
        gain, total = (self.each - other.each).flatten(), self.weight.sum()
        mean = (self.weight.flatten() * gain).sum() / total
        if len(gain) < 2 or not torch.isfinite(mean):
            return bool(mean == torch.inf)
        variance = (self.weight.flatten() * (gain - mean).square()).sum() / (total - 1).clamp_min(1e-9)
        return bool(mean > 2 * (variance / total).sqrt())


class Stack:
    """Networks that train at once, each on rows of its own.

    Args:
        plan: how.
        rows: the table.
        index: the rows ``(s, m)`` of each network.
        candidate: which of those that may be tried.
    """

    def __init__(self, plan: Plan, rows: Rows, index: Tensor, candidate: Candidate):
        self.plan, self.rows, self.index = plan, rows, index
        self.weight = rows.weight[index]
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.model = plan.model(rows.x.shape[1], candidate.hidden, len(index))
        options: dict[str, Any] = {"samples": 2, "antithetic": True, "parallel": True, "lr": plan.lr}
        if plan.method != "bbb":
            options["fisher"] = "sampled" if plan.classes else "exact"
        self.optimizer = BAYESIAN[plan.method](
            self.model,
            num_data=max(1, round(float(self.weight.sum(-1).mean()))),
            likelihood=plan.likelihood(len(index)),
            kl_weight=candidate.kl_weight,
            prior_var=candidate.prior_var,
            generator=torch.Generator().manual_seed(plan.seed),
            **options,
        )

    def start_from(self, mean: Mapping[str, Tensor]) -> None:
        """Take over the weights of networks that were trained before.

        Raises:
            ValueError: if they are of other sizes.
        """
        own = dict(self.model.named_parameters())
        for name, value in mean.items():
            if name not in own or own[name].shape != value.shape:
                raise ValueError(AS_THEY_ARE)
        with torch.no_grad():
            for name, value in mean.items():
                own[name].copy_(value)

    def passes(self, count: int) -> Iterator[int]:
        """Train, yielding the number of each pass when it is done."""

        def draw() -> Tensor:
            return self.index.gather(-1, one_pass(self.weight, self.generator))

        return training.epochs(
            self.optimizer,
            self.rows.x,
            self.rows.y,
            count=count,
            batch_size=self.plan.batch_size,
            draw=draw,
            decay=1.0,
        )

    def predictive(self, index: Tensor) -> Predictive:
        """Of the rows ``(s, v)``, each network's own."""
        return predict(self.model, self.optimizer, self.rows.x[index], samples=TRIAL_SAMPLES)


def choose(
    plan: Plan,
    rows: Rows,
    *,
    tried: Sequence[Candidate],
    max_epochs: int,
    patience: int | None,
    fraction: float,
    divisions: int,
    members: int,
    progress: Progress = lambda what, part: None,
) -> Choice:
    """Train one candidate after the other on parts of the rows, and take those that make the rest clearly more likely.

    Args:
        plan: how.
        rows: the table, standardised; at least two rows.
        tried: the most wanted first.
        max_epochs: passes at most.
        patience: so many looks at held-out rows without gain end a training; None for one look, at its end.
        fraction: of the rows that is held out.
        divisions: how many divisions of the rows there are, trained at once.
        members: networks of the ensemble that is to be. A single division is tried with as many, so that what is chosen
            fits them; several divisions with one network each.
        progress: told how far it is.
    """
    train_index, held = parts(rows, divisions, fraction, torch.Generator().manual_seed(plan.seed))
    train_index = train_index.expand(members if divisions == 1 else divisions, -1)
    every = max_epochs if patience is None else max(1, max_epochs // CHECKS)
    best: Choice | None = None
    for candidate in tried:
        stack = Stack(plan, rows, train_index, candidate)
        looks: list[Choice] = []
        for epoch in stack.passes(max_epochs):
            progress(str(candidate), epoch / max_epochs)
            if epoch % every and epoch < max_epochs:
                continue
            looks.append(_look(stack, held, candidate, epoch))
            if patience is not None and epoch - steadily_best(looks).epochs >= patience * every:
                break
        own = steadily_best(looks)
        if best is None or own.clearly_better_than(best):
            best = own
        elif best.candidate.hidden:
            break  # networks that are freer still would hardly be better; but than a linear model they may be
    assert best is not None
    return best


def steadily_best(looks: Sequence[Choice]) -> Choice:
    """The look whose log-likelihood, averaged with those before and after it, is highest: no lucky one decides."""
    found = torch.tensor([each.log_likelihood for each in looks], dtype=torch.float64).nan_to_num(nan=-torch.inf)
    means = torch.stack([found[max(0, i - 1) : i + 2].mean() for i in range(len(looks))])
    return looks[int(means.argmax())]


def _look(stack: Stack, held: Tensor, candidate: Candidate, epoch: int) -> Choice:
    """How likely held-out rows ``(s, v)`` are now, with the best factors on the noise.

    Rows of a single division are predicted by all networks together.
    """
    y, weight = stack.rows.y[held], stack.rows.weight[held]
    share = weight / weight.sum()
    predictive = stack.predictive(held.expand(len(stack.index), -1))
    if isinstance(predictive, CategoricalMixture):
        if len(held) == 1:
            predictive = CategoricalMixture(predictive.logits.flatten(0, 1).unsqueeze(1))
        each = predictive.log_prob(y)
        return Choice(candidate, epoch, *untouched(1), float((each * share).sum()), each, weight)
    assert isinstance(predictive, GaussianMixture)
    if len(held) == 1:
        loc, scale = (part.flatten(0, 1).unsqueeze(1) for part in (predictive.loc, predictive.scale))
        predictive = GaussianMixture(loc, scale)
    each, factors, below = torch.zeros_like(weight), [], []
    for j in range(y.shape[-1]):  # targets one by one, as if independent
        own = GaussianMixture(predictive.loc[..., j : j + 1], predictive.scale[..., j : j + 1])
        tried = {factor: own.with_noise_scaled(factor).log_prob(y[..., j : j + 1]) for factor in FACTORS}
        totals = {factor: float((found * share).sum()) for factor, found in tried.items()}
        factors.append(max(totals, key=totals.__getitem__))
        each = each + tried[factors[-1]]
        below.append(own.with_noise_scaled(factors[-1]).cdf(y[..., j : j + 1]))
    score = float((each * share).sum())
    noise = torch.tensor(factors, dtype=torch.float64)
    return Choice(candidate, epoch, noise, Calibration.of(below, weight), score, each, weight)


def untouched(targets: int) -> tuple[Tensor, Calibration]:
    """The noise and the intervals as the networks have them."""
    return torch.ones(targets, dtype=torch.float64), Calibration.none(targets)


def default_epochs(rows: Rows, batch_size: int) -> int:
    """As many passes as make ``STEPS`` steps, from 20 to 200."""
    steps = max(1.0, rows.total / batch_size)
    return round(min(200.0, max(20.0, STEPS / steps)))


def default_batch(rows: Rows) -> int:
    """A thirtieth of the rows, from 10 to 100."""
    return checks.integer("rows", round(min(100.0, max(10.0, rows.total / 30))))

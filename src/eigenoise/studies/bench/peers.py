"""One training step of other people's Bayesian and second-order methods, used as their authors' examples use them.

Two things are ours: all start from the weights of the case's network, and their learning rate is small, so that none
diverges on random numbers. A peer is imported only when its step is made.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from eigenoise.studies.bench.cases import Case

Step = Callable[[], None]
Maker = Callable[..., nn.Module]

LR = 1e-4
MOMENTUM = 0.9
LINEAR = ("in_features", "out_features")
CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
SINGD_EVERY = 10  # steps between two updates of its preconditioner


class Unsupported(Exception):  # noqa: N818 - it tells of a limit of the peer, not of an error here
    """A peer cannot do a case; the message says why."""


def _ivon(case: Case) -> Step:
    import ivon

    model = case.make()
    optimizer = ivon.IVON(model.parameters(), lr=LR, ess=case.num_data)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            case.loss(model(case.x), case.y).backward()
        optimizer.step()

    return step


def _torchbnn(case: Case) -> Step:
    import torchbnn as bnn

    prior = {"prior_mu": 0, "prior_sigma": 0.1}
    linear, conv = (functools.partial(layer, **prior) for layer in (bnn.BayesLinear, bnn.BayesConv2d))
    model = _replaced(case, linear, conv)
    divergence = bnn.BKLLoss(reduction="mean", last_layer_only=False)
    return _sgd(model, lambda: case.loss(model(case.x), case.y) + 0.1 * divergence(model))  # 0.1 as in its demo


def _bayesian_torch(case: Case) -> Step:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    model = _network(case)
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": "Reparameterization",
        "moped_enable": True,  # its way to start from given weights, with half of each as the stddev
        "moped_delta": 0.5,
    }
    dnn_to_bnn(model, settings)
    return _sgd(model, lambda: case.loss(model(case.x), case.y) + get_kl_loss(model) / len(case.x))


def _blitz(case: Case) -> Step:
    from blitz.modules import BayesianConv2d, BayesianLinear
    from blitz.utils import variational_estimator

    @variational_estimator
    class Estimator(nn.Sequential):  # around the network, for the decorator would write into the network's own class
        pass

    model: Any = Estimator(_replaced(case, BayesianLinear, BayesianConv2d))
    elbo = functools.partial(model.sample_elbo, sample_nbr=1, complexity_cost_weight=1 / case.num_data)
    return _sgd(model, lambda: elbo(inputs=case.x, labels=case.y, criterion=case.loss))


def _singd(case: Case) -> Step:
    from singd.optim.optimizer import SINGD

    model = _network(case)
    optimizers: list[torch.optim.Optimizer] = [
        SINGD(
            model,
            lr=LR,
            momentum=MOMENTUM,
            T=SINGD_EVERY,
            loss_average="batch",
            structures=("dense", "dense"),
            warn_unsupported=False,
        )
    ]
    if rest := _other_parameters(model):  # of norms, which SINGD leaves alone
        optimizers.append(torch.optim.SGD(rest, lr=LR, momentum=MOMENTUM))

    def step() -> None:
        model.zero_grad()
        case.loss(model(case.x), case.y).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def _laplace(case: Case) -> Step:
    from laplace import Laplace

    model = _network(case)
    for parameter in _other_parameters(model):
        parameter.requires_grad_(False)  # norms have no Kronecker factors; fit() refuses those that want a gradient
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=None, sampler=[slice(None)])  # all rows, no copying
    likelihood = "classification" if case.classification else "regression"

    def step() -> None:
        Laplace(model, likelihood, subset_of_weights="all", hessian_structure="kron").fit(loader)

    return step


def _sgd(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def _network(case: Case) -> nn.Module:
    """Returns the case's network, if it holds a layer that all peers know.

    Raises:
        Unsupported: if it holds none.
    """
    model = case.make()
    if not any(isinstance(child, (nn.Linear, nn.Conv2d)) for parent in model.modules() for child in parent.children()):
        raise Unsupported("the network holds no Linear or Conv2d layer")
    return model


def _other_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that belong to no Linear or Conv2d layer."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    known = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in known]


def _replaced(case: Case, linear: Maker, conv: Maker) -> nn.Module:
    """Returns the case's network with a Bayesian layer in place of each Linear and each Conv2d."""
    model = _network(case)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, _started(linear(**_settings(layer, LINEAR)), layer))
            elif isinstance(layer, nn.Conv2d):
                if layer.padding_mode != "zeros":
                    raise Unsupported(f"its convolutions pad with zeros only, not {layer.padding_mode!r}")
                setattr(parent, name, _started(conv(**_settings(layer, CONV)), layer))
    return model


def _settings(layer: nn.Linear | nn.Conv2d, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


@torch.no_grad()
def _started(bayesian: nn.Module, layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """``bayesian`` with the weights of ``layer`` as means: its own start makes the outputs of deep networks explode."""
    for name, parameter in bayesian.named_parameters():
        value = layer.bias if "bias" in name else layer.weight
        if "mu" not in name:
            parameter.fill_(-5.0)  # a stddev of 0.0067, be it the logarithm's or softplus's argument
        elif value is not None:
            parameter.copy_(value)
    return bayesian


@dataclass(frozen=True)
class _Peer:
    module: str
    make: Callable[[Case], Step]
    period: int = 1  # steps after which its costs repeat


_KNOWN = {
    "IVON (ivon-opt)": _Peer("ivon", _ivon),
    "BBB (torchbnn)": _Peer("torchbnn", _torchbnn),
    "BBB (bayesian-torch)": _Peer("bayesian_torch", _bayesian_torch),
    "BBB (BLiTZ)": _Peer("blitz", _blitz),
    f"SINGD dense, every {SINGD_EVERY} (singd)": _Peer("singd", _singd, period=SINGD_EVERY),
    "Laplace fit, Kronecker, per batch (laplace-torch)": _Peer("laplace", _laplace),
}
PERIODS: Mapping[str, int] = MappingProxyType({label: peer.period for label, peer in _KNOWN.items()})


def installed() -> dict[str, Callable[[Case], Step]]:
    """Returns the peers whose module can be found; none is imported."""
    return {label: peer.make for label, peer in _KNOWN.items() if importlib.util.find_spec(peer.module) is not None}

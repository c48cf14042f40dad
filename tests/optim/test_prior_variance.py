"""A prior variance for each layer: what each layer has, and that step, posterior, KL, files and resume use it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import accepted
from eigenoise.optim.prior_variance import prior_variance

METHODS = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop]
N = 40


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1, bias=False))


def build(method=en.NoisyEKFAC, model=None, **options):
    options = {**accepted(method, noise_ramp=0, reuse_noise=False), "prior_var": "fan-in", **options}
    generator = torch.Generator().manual_seed(5)
    likelihood = en.GaussianLikelihood(precision=2.0)
    return method(model or network(), num_data=N, likelihood=likelihood, generator=generator, **options)


def step(opt):
    torch.manual_seed(1)
    with opt.sampled_params():
        opt.zero_grad()
        opt.likelihood.nll(opt.model(torch.randn(8, 5)), torch.randn(8, 1)).backward()
    opt.step()


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.place = nn.Parameter(torch.zeros(3, 6))
        self.mix = nn.Conv1d(6, 6, 3, groups=2, padding=1)
        self.up = nn.ConvTranspose1d(6, 4, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.up(self.mix((self.words(x) + self.place).mT)).mean(-1))


def test_fan_in_counts_what_a_weight_multiplies():
    opt = en.NoisyEKFAC(Embedded(), num_data=N, likelihood="classification", prior_var="fan-in")
    variances = opt.prior_vars
    assert variances["words.weight"] == 0.01
    assert variances["head"] == 2 / 4  # the bias is no input
    grouped = [value for name, value in variances.items() if name.startswith("mix")]
    assert set(grouped) <= {2 / 9, 0.01}  # three taps of three channels each; the bias may stand alone
    assert 2 / 9 in grouped


def test_names_beat_fan_in_and_longer_names_shorter_ones():
    assert build(prior_var={"": 3.0, "1": 2.0, "1.bias": 0.5}).prior_vars == {
        "0": 3.0,
        "1.weight": 2.0,
        "1.bias": 0.5,
        "3": 3.0,
    }
    assert build(prior_var={"3": 2.0}).prior_vars == {"0": 2 / 5, "1.weight": 0.01, "1.bias": 0.01, "3": 2.0}


@pytest.mark.parametrize("method", METHODS)
def test_one_variance_is_the_same_by_every_name(method):
    """Four ways to say 0.3 train alike."""
    runs = []
    for prior_var in (0.3, {"": 0.3}, dict.fromkeys(("0", "1.weight", "1.bias", "3"), 0.3)):
        opt = build(method, prior_var=prior_var)
        for _ in range(3):
            step(opt)
        runs.append((opt.kl(), [p.clone() for p in opt.model.parameters()]))
    for kl, params in runs[1:]:
        torch.testing.assert_close(kl, runs[0][0], rtol=0, atol=0)
        for one, other in zip(params, runs[0][1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_kl_is_that_of_the_posterior_to_each_layers_prior(method):
    opt = build(method, prior_var={"0": 0.1, "3": 5.0})
    for _ in range(3):
        step(opt)
    assert float(opt.kl()) == pytest.approx(float(opt.posterior.kl(opt.prior_vars)), rel=1e-9)
    assert float(opt.kl()) != pytest.approx(float(opt.posterior.kl(1.0)), rel=1e-2)


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam])
def test_before_the_first_statistics_each_layer_has_its_prior(method):
    opt = build(method)
    for name, q in opt.posterior.items():
        torch.testing.assert_close(q.variance, torch.full_like(q.mean, opt.prior_vars[name]))


def test_each_layer_is_damped_by_its_own_prior():
    opt = build(kl_weight=0.5)
    for slot in opt.slots:
        assert slot.damping(opt.group) == pytest.approx(0.5 / (N * opt.prior_vars[slot.name]))


def test_a_schedule_may_change_the_variance_of_a_layer():
    opt = build(prior_var={"0": 0.1})
    opt.param_groups[0]["prior_var"] = {"0": 0.2}
    assert opt.prior_vars["0"] == 0.2
    opt.param_groups[0]["prior_var"] = {"nowhere": 0.2}
    with pytest.raises(ValueError, match="prior_var names 'nowhere'"):
        step(opt)


def test_a_resumed_run_has_the_saved_variances(tmp_path):
    straight = build(prior_var={"0": 0.1})
    step(straight)
    file = tmp_path / "state.pt"
    torch.save([straight.model.state_dict(), straight.state_dict()], file)
    resumed = build(prior_var=1.0)
    weights, state = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.prior_vars == straight.prior_vars
    for opt in (straight, resumed):
        step(opt)
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_callers_mapping_is_not_shared():
    variances = {"0": 0.1}
    opt = build(prior_var=variances)
    variances["0"] = 9.0
    assert opt.prior_vars["0"] == 0.1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("prior_var", "error", "message"),
    [
        ("fan-out", ValueError, "prior_var must be a number, 'fan-in' or numbers by name, got 'fan-out'"),
        ({"0": 0.0}, ValueError, r"prior_var\['0'\] must be a finite number at least 1e-20, got 0\.0"),
        ({"0": "wide"}, TypeError, r"prior_var\['0'\] must be a number"),
        ({"9": 1.0}, ValueError, "prior_var names '9', but the model has no trainable layer there"),
        (None, TypeError, "prior_var must be a number"),
        (math.inf, ValueError, "prior_var must be a finite number"),
    ],
)
def test_other_variances_are_refused(method, prior_var, error, message):
    with pytest.raises(error, match=message):
        build(method, prior_var=prior_var)


def test_a_posterior_wants_a_variance_for_every_layer():
    with pytest.raises(ValueError, match=r"a variance for every layer, got none for '(1\.weight|3)'"):
        build().posterior.kl({"0": 1.0})


def test_numbers_of_any_kind_are_variances():
    assert prior_variance(3, build().slots[0].layer) == 3.0

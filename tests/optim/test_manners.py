"""Good manners: the mean survives everything, resume is bit-exact, bad input is refused before anything changes."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import accepted
from eigenoise import linalg
from eigenoise.checks import NotFiniteError

NATURAL = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.EKFAC, en.KFAC]
ALL = [*NATURAL, en.BayesByBackprop]
NOISY = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop]


@pytest.fixture
def data():
    return torch.randn(8, 3), torch.randn(8, 1)


def build(method=en.NoisyEKFAC, likelihood=None, model=None, seed=5, **options):
    torch.manual_seed(2)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    likelihood = likelihood or en.GaussianLikelihood()
    options = {
        "generator": torch.Generator().manual_seed(seed),
        **accepted(method, noise_ramp=0, reuse_noise=False),
        **options,
    }
    return method(model, num_data=50, likelihood=likelihood, **options)


def step(opt, x, y):
    with opt.sampled_params():
        opt.zero_grad()
        opt.likelihood.nll(opt.model(x), y).backward()
    opt.step()


def snapshot(opt):
    """Everything a step may change, copied."""
    return copy.deepcopy((opt.model.state_dict(), opt.state_dict()))


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def parameters(opt):
    return {name: p.detach().clone() for name, p in opt.model.named_parameters()}


# Sampling.


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_mean_in_place(data, method, error):
    opt = build(method)
    step(opt, *data)
    before = parameters(opt)

    def interrupted():
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
            raise error

    with pytest.raises(error):
        interrupted()
    assert same(parameters(opt), before)
    step(opt, *data)  # and training goes on


@pytest.mark.parametrize("method", NOISY)
def test_a_block_samples_and_restores_bit_for_bit(data, method):
    opt = build(method)
    for _ in range(3):
        step(opt, *data)
    before = parameters(opt)
    with opt.sampled_params():
        assert not any(torch.equal(p, before[name]) for name, p in opt.model.named_parameters())
    assert same(parameters(opt), before)


@pytest.mark.parametrize("method", [en.KFAC, en.EKFAC])
def test_plain_methods_have_no_noise(data, method):
    opt = build(method)
    step(opt, *data)
    before = parameters(opt)
    with opt.sampled_params():
        assert same(parameters(opt), before)


def test_noise_is_reproducible_and_leaves_the_global_generator_alone(data):
    state = torch.get_rng_state()
    one, other, third = build(), build(), build(seed=6)
    torch.set_rng_state(state)
    for opt in (one, other, third):
        for _ in range(3):
            step(opt, *data)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(parameters(one), parameters(other))
    assert not same(parameters(one), parameters(third))


def test_the_default_generator_follows_manual_seed(data):
    results = []
    for _ in range(2):
        torch.manual_seed(9)
        model = nn.Linear(3, 1)
        opt = en.NoisyEKFAC(model, num_data=50, likelihood=en.GaussianLikelihood())
        step(opt, *data)
        results.append(parameters(opt))
    assert same(*results)


def test_a_generator_of_ones_own_leaves_the_optimisers_alone():
    opt = build()
    state = opt.generator.get_state()
    with opt.sampled_params(torch.Generator().manual_seed(1)):
        one = parameters(opt)
    with opt.sampled_params(torch.Generator().manual_seed(1)):
        assert same(parameters(opt), one)
    assert torch.equal(opt.generator.get_state(), state)


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_neither_does_a_loss_that_is_looked_at_when_statistics_are_due(data, fisher):
    opt = build(fisher=fisher)
    state = opt.generator.get_state()
    with opt.sampled_params(torch.Generator().manual_seed(1)):
        assert opt.likelihood.nll(opt.model(data[0]), data[1]).isfinite()
    assert torch.equal(opt.generator.get_state(), state)


def test_nesting_is_refused(data):
    opt = build()
    before = parameters(opt)
    with opt.sampled_params(), pytest.raises(RuntimeError, match="cannot be nested"), opt.sampled_params():
        raise AssertionError("the inner block must not run")
    assert same(parameters(opt), before)


def test_a_backward_pass_that_comes_too_late_is_an_error(data):
    opt = build(model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    with opt.sampled_params():
        loss = opt.likelihood.nll(opt.model(data[0]), data[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("what", ["step", "state_dict", "kl", "close", "load_state_dict"])
def test_what_needs_the_mean_is_refused_inside_a_block(what):
    opt = build()
    arguments = ({},) if what == "load_state_dict" else ()
    with opt.sampled_params(), pytest.raises(RuntimeError, match=r"inside sampled_params\(\)"):
        getattr(opt, what)(*arguments)
    with opt.sampled_params(), pytest.raises(RuntimeError, match="posterior inside"):
        _ = opt.posterior


def test_a_likelihood_serves_one_optimiser_at_a_time():
    likelihood = en.GaussianLikelihood()
    one, other = build(likelihood=likelihood), build(likelihood=likelihood)
    before = parameters(other)
    with one.sampled_params(), pytest.raises(RuntimeError, match="another optimiser"), other.sampled_params():
        raise AssertionError("the inner block must not run")
    assert same(parameters(other), before)


def test_a_closed_optimiser_is_closed(data):
    opt = build()
    step(opt, *data)
    before = parameters(opt)
    opt.close()
    with pytest.raises(RuntimeError, match="closed"), opt.sampled_params():
        raise AssertionError("the block must not run")
    assert same(parameters(opt), before)


# Stepping.


@pytest.mark.parametrize("method", ALL)
def test_step_without_a_backward_pass_is_refused(data, method):
    opt = build(method)
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match="no training loss"):
        opt.step()
    with opt.sampled_params():
        opt.model(data[0])
    with pytest.raises(RuntimeError, match=r"call likelihood.nll"):
        opt.step()
    opt.likelihood.nll(opt.model(data[0]), data[1]).backward()  # outside a block
    with pytest.raises(RuntimeError, match=r"inside sampled_params\(\)"):
        opt.step()
    before[1]["eigenoise"]["generator"] = opt.generator.get_state()
    for name in ("weight", "bias"):
        assert torch.equal(opt.model.state_dict()[f"0.{name}"], before[0][f"0.{name}"])
    assert same(opt.state_dict(), before[1])


def test_cleared_gradients_are_noticed(data):
    opt = build()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    opt.model.zero_grad()
    with pytest.raises(RuntimeError, match="no gradients"):
        opt.step()


def test_the_number_of_samples_is_checked(data):
    opt = build(samples=3)
    step_block = lambda: opt.likelihood.nll(opt.model(data[0]), data[1]).backward()  # noqa: E731
    opt.zero_grad()
    with opt.sampled_params():
        step_block()
    with pytest.raises(RuntimeError, match="expected 3 sampled_params"):
        opt.step()
    with opt.sampled_params(), pytest.raises(RuntimeError, match="would drop the gradients"):
        opt.zero_grad()
    opt.zero_grad()
    for _ in range(3):
        with opt.sampled_params():
            step_block()
    opt.step()
    assert opt.steps == 1


def test_a_step_that_was_given_up_leaves_no_trace(data):
    x, y = data
    clean, given_up = build(), build()
    state = given_up.generator.get_state()
    with given_up.sampled_params():
        given_up.likelihood.nll(given_up.model(5 * x), y).backward()
    given_up.zero_grad()
    given_up.generator.set_state(state)
    given_up.model[1].reset_running_stats()
    for opt in (clean, given_up):
        step(opt, x, y)
    assert same(snapshot(clean), snapshot(given_up))


def test_parameters_without_a_gradient_stay(data):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            return self.used(x)

    opt = build(model=TwoHeads(), stats_every=1)
    before = parameters(opt)
    for _ in range(3):
        step(opt, *data)
    after = parameters(opt)
    assert torch.equal(after["unused.weight"], before["unused.weight"])
    assert not torch.equal(after["used.weight"], before["used.weight"])


# Numbers that are not finite.


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("stats", [1, 5])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "y"])
def test_a_poisoned_batch_changes_nothing(data, method, stats, poison, where):
    x, y = data
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    options = {} if method is en.BayesByBackprop else {"stats_every": stats}
    opt = build(method, model=model, **options)
    step(opt, x, y)
    before = snapshot(opt)
    bad_x, bad_y = x.clone(), y.clone()
    {"x": bad_x, "y": bad_y}[where][2, 0] = poison
    if where == "x" and poison == math.inf:
        bad_x[2, 0] = math.nan  # tanh would hide an infinity
    with pytest.raises(NotFiniteError, match="mean weights are unchanged"):
        step(opt, bad_x, bad_y)
    before[1]["eigenoise"]["generator"] = opt.generator.get_state()
    assert same(snapshot(opt), before)
    step(opt, x, y)
    assert all(torch.isfinite(p).all() for p in opt.model.parameters())


def test_an_activation_that_overflows_is_named(data):
    """The gradient is finite, the statistic is not."""
    x, y = data
    model = nn.Sequential(nn.Linear(3, 1)).float()
    opt = build(model=model)
    before = parameters(opt)
    huge = x.float() * 1e25
    with opt.sampled_params():
        opt.zero_grad()
        (1e-38 * opt.likelihood.nll(1e-25 * opt.model(huge), y.float())).backward()
    with pytest.raises(NotFiniteError, match="statistic"):
        opt.step()
    assert same(parameters(opt), before)


def test_not_finite_is_both_kinds_of_error():
    assert issubclass(NotFiniteError, ValueError)
    assert issubclass(NotFiniteError, FloatingPointError)


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC])
def test_a_failing_eigendecomposition_keeps_the_basis_and_warns_once(data, method, monkeypatch):
    every = {"refresh_every": 1}
    opt = build(method, stats_every=1, **every)
    step(opt, *data)
    basis = opt.slots[0].fisher.factors.q_in.clone()
    monkeypatch.setattr(linalg, "eigh_psd", lambda matrix: None)
    with pytest.warns(RuntimeWarning, match="the old basis is kept"):
        step(opt, *data)
    step(opt, *data)  # warnings are errors here: a second one would fail
    assert torch.equal(opt.slots[0].fisher.factors.q_in, basis)
    monkeypatch.undo()
    step(opt, *data)
    assert not torch.equal(opt.slots[0].fisher.factors.q_in, basis)
    assert all(torch.isfinite(p).all() for p in opt.model.parameters())


# State.


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("update", ["closed-form", "adam"])
def test_resume_is_bit_exact(data, method, update):
    def fresh(seed):
        options = {} if method is en.BayesByBackprop else {"stats_every": 2}
        options |= accepted(method, samples=2, antithetic=True)
        return build(method, en.GaussianLikelihood(update=update), seed=seed, **options)

    def train(opt, steps):
        for _ in range(steps):
            opt.zero_grad()
            for _ in range(opt.blocks_per_step):
                with opt.sampled_params():
                    opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
            opt.step()

    straight = fresh(5)
    train(straight, 5)
    saved = through_a_file({"model": straight.model.state_dict(), "opt": straight.state_dict()})
    untouched = copy.deepcopy(saved)
    train(straight, 7)
    resumed = fresh(99)
    train(resumed, 3)
    resumed.model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    train(resumed, 7)
    assert same(saved, untouched)
    assert same(snapshot(straight), snapshot(resumed))
    if straight.noisy:
        assert same(straight.elbo_terms(), resumed.elbo_terms())


def test_hyperparameters_travel_with_the_state(data):
    one, other = build(), build()
    one.param_groups[0].update(lr=0.5, kl_weight=0.25)
    other.load_state_dict(one.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    assert other.slots[0].damping(other.group) == one.slots[0].damping(one.group)


def test_states_of_others_are_refused_before_anything_changes(data):
    opt = build()
    step(opt, *data)
    before = snapshot(opt)
    smaller = build(model=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1)))
    cases = [
        (torch.optim.SGD(opt.model.parameters(), lr=0.1).state_dict(), "another library's"),
        (build(en.NoisyKFAC).state_dict(), "NoisyKFAC"),
        (build(model=nn.Sequential(nn.Linear(3, 1))).state_dict(), "layers"),
        (smaller.state_dict(), "shape"),
        (build(likelihood=en.CategoricalLikelihood()).state_dict(), "GaussianLikelihood"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(state)
        assert same(snapshot(opt), before)


@pytest.mark.parametrize("method", ALL)
def test_the_model_can_be_copied_and_pickled(data, method):
    opt = build(method)
    step(opt, *data)
    twin = copy.deepcopy(opt.model)
    again = pickle.loads(pickle.dumps(opt.model))
    for other in (twin, again):
        assert same(dict(other.state_dict()), dict(opt.model.state_dict()))


# Arguments.

BAD = [
    ({"num_data": 0}, ValueError, "num_data must be at least 1, got 0"),
    ({"num_data": -3}, ValueError, "num_data must be at least 1"),
    ({"num_data": 10.0}, TypeError, "num_data must be an int"),
    ({"num_data": True}, TypeError, "num_data must be an int"),
    ({"likelihood": nn.MSELoss()}, TypeError, "likelihood must be one of eigenoise's likelihoods"),
    ({"lr": -0.1}, ValueError, "lr must be"),
    ({"lr": math.nan}, ValueError, "lr must be"),
    ({"lr": "fast"}, TypeError, "lr must be a number"),
    ({"kl_weight": -1.0}, ValueError, "kl_weight must be"),
    ({"prior_var": 0.0}, ValueError, "prior_var must be"),
    ({"prior_var": -1.0}, ValueError, "prior_var must be"),
    ({"samples": 0}, ValueError, "samples must be at least 1"),
    ({"others": "maybe"}, ValueError, "others must be one of 'diagonal', 'point'"),
    ({"batch_dim": -1}, ValueError, "batch_dim must be"),
]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (en.NoisyAdam, {"basis_rank": 0.5}, "basis_rank"),
        (en.NoisyAdam, {"refresh_every": 3}, "refresh_every"),
        (en.NoisyAdam, {"reinit_every": 50}, "reinit_every"),
        (en.NoisyKFAC, {"reinit_every": 50}, "reinit_every"),
        (en.KFAC, {"samples": 2}, "samples"),
        (en.NoisyEKFAC, {"eig_every": 3}, "eig_every"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(method, options, message):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{message}'"):
        build(method, **options)


BAD_NATURAL = [
    ({"damping": -1e-3}, ValueError, "damping must be"),
    ({"momentum": 1.0}, ValueError, "momentum must be"),
    ({"ema_factors": 0.0}, ValueError, "ema_factors must be"),
    ({"ema_scale": 1.5}, ValueError, "ema_scale must be"),
    ({"stats_every": 0}, ValueError, "stats_every must be"),
    ({"scale_every": -1}, ValueError, "scale_every must be"),
    ({"refresh_every": 2.5}, TypeError, "refresh_every must be an int"),
    ({"reinit_every": 0}, ValueError, "reinit_every must be"),
    ({"fisher": "guessed"}, ValueError, "fisher must be one of 'sampled', 'exact', 'empirical'"),
    ({"layer_clip": 0.0}, ValueError, "layer_clip must be"),
    ({"kl_clip": -1.0}, ValueError, "kl_clip must be"),
    ({"init": 0.0}, ValueError, "init must be"),
]


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [(method, *case) for method in (en.NoisyEKFAC, en.BayesByBackprop) for case in BAD]
    + [(en.NoisyEKFAC, *case) for case in BAD_NATURAL]
    + [
        (en.NoisyKFAC, {"refresh_every": 0}, ValueError, "refresh_every must be"),
        (en.KFAC, {"damping_form": "none"}, ValueError, "damping_form must be one of"),
        (en.BayesByBackprop, {"init_std": 0.0}, ValueError, "init_std must be"),
        (en.BayesByBackprop, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be"),
    ],
)
def test_bad_arguments_are_refused_by_name(method, options, error, message):
    arguments = {"num_data": 50, "likelihood": en.GaussianLikelihood()} | options
    with pytest.raises(error, match=message):
        method(nn.Linear(3, 1), **arguments)


def test_a_model_must_be_a_module():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got a list"):
        en.NoisyEKFAC([1, 2], num_data=5, likelihood=en.GaussianLikelihood())


def test_a_second_parameter_group_is_refused():
    opt = build()
    with pytest.raises(ValueError, match="whole model in one group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("method", ALL)
def test_a_gradient_scaler_changes_nothing(data, method):
    def train(scaled):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        options = {} if method is en.BayesByBackprop else {"fisher": "empirical", "stats_every": 2}
        opt = build(method, model=model, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for _ in range(5):
            with opt.sampled_params():
                opt.zero_grad()
                scaler.scale(opt.likelihood.nll(opt.model(data[0]), data[1])).backward()
            scaler.step(opt)
            scaler.update()
        return parameters(opt)

    plain, scaled = train(False), train(True)
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value, rtol=1e-9, atol=1e-12)


def test_gradients_may_be_clipped_before_the_step(data):
    opt = build(momentum=0.0, layer_clip=None, prior_var=1e9, noise_ramp=10)
    before = parameters(opt)
    with opt.sampled_params():
        opt.zero_grad()
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    nn.utils.clip_grad_norm_(opt.model.parameters(), 1e-12)
    opt.step()
    for name, value in parameters(opt).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", ALL)
def test_steps_that_cannot_be_made_are_skipped_and_counted(data, method):
    opt = build(method, not_finite="skip")
    step(opt, *data)
    before = parameters(opt)
    with pytest.warns(RuntimeWarning, match="the mean weights are unchanged.*the step is skipped"):
        step(opt, data[0] * math.nan, data[1])
    for _ in range(3):
        step(opt, data[0] * math.inf, data[1])  # said only once
    assert (opt.steps, opt.skipped) == (1, 4)
    assert all(torch.equal(value, before[name]) for name, value in parameters(opt).items())
    step(opt, *data)
    assert opt.steps == 2
    assert not all(torch.equal(value, before[name]) for name, value in parameters(opt).items())
    again = build(method, not_finite="skip")
    again.load_state_dict(opt.state_dict())
    assert again.skipped == 4
    for _ in range(19):
        step(opt, data[0] * math.nan, data[1])
    with pytest.raises(NotFiniteError, match="is NaN or infinite"):  # it does not get better
        step(opt, data[0] * math.nan, data[1])
    assert opt.skipped == 24
    with pytest.raises(ValueError, match="not_finite must be one of"):
        build(method, not_finite="ignore")


@pytest.mark.parametrize("method", [method for method in ALL if method is not en.BayesByBackprop])
def test_classes_that_cannot_be_drawn_stop_the_step_too(method):
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(6, 3)
    opt = method(model, num_data=9, likelihood=en.CategoricalLikelihood(), stats_every=1)
    step(opt, x, torch.arange(6) % 2)
    with pytest.raises(NotFiniteError, match="mean weights are unchanged"):
        step(opt, x * math.nan, torch.arange(6) % 2)
    step(opt, x, torch.arange(6) % 2)


# What happens between steps.


def test_validation_in_inference_mode_does_not_spoil_training(data):
    for method in ALL:
        opt = build(method)
        step(opt, *data)
        with torch.inference_mode():
            opt.likelihood.nll(opt.model(data[0]), data[1])
            opt.elbo(*data)
            en.predict(opt.model, opt, data[0])
        step(opt, *data)
        assert opt.steps == 2


@pytest.mark.parametrize("width", [4, 5])
def test_a_stack_may_share_parameters(width):
    stack = 4
    model = nn.Sequential(
        en.models.StackedLinear(stack, 3, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        en.models.StackedLinear(stack, width, 1),
    )
    opt = build(model=model, likelihood=en.GaussianLikelihood(stack=stack), lr=1.0)
    before = parameters(opt)
    step(opt, torch.randn(stack, 8, 3), torch.randn(stack, 8, 1))
    slot = next(slot for slot in opt.slots if slot.name == "1.weight")
    change = parameters(opt)["1.weight"] - before["1.weight"]
    size = (change.square() * slot.fisher.spectrum(slot.damping(opt.group))).sum()
    assert 0 < size <= 1e-3 * (1 + 1e-9)  # clipped as a whole, not coordinate by coordinate
    whole = sum(float(slot.kl(opt.group).sum()) for slot in opt.slots)
    assert float(opt.kl().sum()) == pytest.approx(whole)


def test_plain_methods_measure_the_bound_of_their_laplace_posterior(data):
    opt = build(en.EKFAC)
    step(opt, *data)
    at_mean = opt.likelihood.log_prob(opt.model.eval()(data[0]), data[1]).mean() * 50
    assert opt.elbo(*data, samples=200).log_likelihood < at_mean
    assert "no noise in training" in repr(opt)
    assert "point estimate" in repr(build(en.EKFAC, others="point"))


@pytest.mark.parametrize("clear", ["model", "opt", "opt in place"])
def test_bayes_by_backprop_however_gradients_are_cleared(data, clear):
    def train(how):
        opt = build(en.BayesByBackprop, lr=0.1)
        for _ in range(4):
            with opt.sampled_params():
                {
                    "model": opt.model.zero_grad,
                    "opt": opt.zero_grad,
                    "opt in place": lambda: opt.zero_grad(set_to_none=False),
                }[how]()
                opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
            opt.step()
        return opt.slots[0].std

    assert same(train(clear), train("opt"))


def test_an_optimiser_cannot_be_copied():
    opt = build()
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copier(opt)


def test_targets_of_another_float_type_are_taken(data):
    opt = build(model=nn.Sequential(nn.Linear(3, 1)).float())
    x, y = data[0].float(), data[1]
    step(opt, x, y.float())
    step(opt, x, y.double())
    assert opt.steps == 2
    assert opt.elbo_terms().value.dtype == torch.float64 or torch.isfinite(opt.elbo_terms().value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.float(), "got torch.float32"),
        (lambda model: model[0].weight.requires_grad_(False), "'0.weight' was frozen"),
    ],
)
def test_a_model_that_changed_is_refused(data, change, message):
    opt = build()
    step(opt, *data)
    change(opt.model)
    with pytest.raises(RuntimeError, match=message), opt.sampled_params():
        raise AssertionError("the block must not run")


@pytest.mark.parametrize(("name", "value"), [("kl_weight", -1.0), ("prior_var", 0.0), ("num_data", 0)])
def test_a_bad_schedule_is_refused_at_the_block(name, value):
    opt = build()
    opt.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be"), opt.sampled_params():
        raise AssertionError("the block must not run")


def test_elbo_terms_average_the_blocks_of_a_step(data):
    x, y = data
    opt = build(samples=2, lr=0.0)
    losses = []
    for scale in (1.0, 10.0):
        with opt.sampled_params():
            loss = opt.likelihood.nll(opt.model(x), scale * y)
            loss.backward()
            losses.append(loss.detach())
    opt.step()
    torch.testing.assert_close(opt.elbo_terms().log_likelihood, -50 * (losses[0] + losses[1]) / 2)


def test_a_damaged_state_changes_nothing(data):
    opt, other = build(), build()
    step(opt, *data)
    step(other, *data)
    before = snapshot(opt)
    for damage in (
        lambda s: s["eigenoise"].pop("generator"),
        lambda s: s["param_groups"][0].pop("momentum"),
        lambda s: s["param_groups"][0].update(lr=-5.0),
        lambda s: s["param_groups"][0]["params"].pop(),
        lambda s: s["eigenoise"]["likelihood"].pop("b"),
        lambda s: s["eigenoise"]["slots"]["0"].pop("R"),
        lambda s: s["eigenoise"]["losses"].pop("last"),
        lambda s: s["eigenoise"].update(generator=torch.zeros(16, dtype=torch.uint8)),  # a CUDA generator's
    ):
        state = copy.deepcopy(other.state_dict())
        damage(state)
        with pytest.raises(ValueError, match=r"must|lacks|expected"):
            opt.load_state_dict(state)
        assert same(snapshot(opt), before)


def test_a_state_of_bayes_by_backprop_needs_adams_part(data):
    opt = build(en.BayesByBackprop)
    step(opt, *data)
    before = snapshot(opt)
    state = copy.deepcopy(opt.state_dict())
    del state["eigenoise"]["adam"]
    with pytest.raises(ValueError, match=r"the state lacks \['adam'\]"):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)


def test_a_layer_used_late_gets_a_full_first_step(data):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)
            self.use = False

        def forward(self, x):
            return self.a(x) + (self.b(x) if self.use else 0)

    opt = build(en.EKFAC, model=Late(), lr=1e-6, max_move=None, stats_every=1)
    for _ in range(20):
        step(opt, *data)
    opt.model.use = True
    before = parameters(opt)["b.weight"]
    with opt.sampled_params():
        opt.zero_grad()
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    opt.step()
    slot = opt.slots[1]
    gradient = slot.fisher.unrotate(slot.momentum) / 0.1  # of which the momentum has taken a tenth
    full = slot.fisher.solve(gradient, slot.damping(opt.group))[:, :-1]
    torch.testing.assert_close(parameters(opt)["b.weight"] - before, -1e-6 * full, rtol=1e-6, atol=1e-15)


def test_numpy_numbers_are_plain_in_the_state():
    import numpy as np

    model = nn.Linear(3, 1)
    opt = en.NoisyEKFAC(model, num_data=np.int64(50), likelihood=en.GaussianLikelihood(), lr=np.float64(0.1))
    assert through_a_file(opt.state_dict())["param_groups"][0]["num_data"] == 50


def test_a_skipped_step_does_not_confuse_the_next(data):
    opt = build(samples=2)
    for _ in range(2):  # as a gradient scaler does that found an overflow
        with opt.sampled_params():
            opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    with opt.sampled_params():
        opt.zero_grad()
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()
    opt.step()
    assert opt.steps == 1


def test_a_closure_may_return_nothing(data):
    opt = build()

    def closure():
        opt.likelihood.nll(opt.model(data[0]), data[1]).backward()

    assert opt.step(closure) is None
    assert opt.steps == 1


def test_one_module_in_two_places_is_one_layer():
    shared = nn.Linear(3, 3)
    opt = build(model=nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 1)), stats_every=1)
    step(opt, torch.randn(8, 3), torch.randn(8, 1))
    assert [slot.name for slot in opt.slots] == ["0", "3"]


def test_extra_state_does_not_hinder_the_posterior(data):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": "hello"}

        def set_extra_state(self, state):
            self.note = state["note"]

    opt = build(model=nn.Sequential(Extra(3, 1)))
    step(opt, *data)
    assert list(opt.posterior) == ["0"]

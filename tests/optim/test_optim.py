"""The optimisers' arithmetic: one step against dense formulas, and everything that shapes a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eigenoise as en
from arguments import BAYES, PAPER_STEP, accepted
from eigenoise.optim.spectra import spectra

TOL = {"rtol": 1e-9, "atol": 1e-11}
NATURAL = [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.EKFAC, en.KFAC]
ALL = [*NATURAL, en.BayesByBackprop]
N = 50


@pytest.fixture
def data():
    torch.manual_seed(1)
    x = torch.randn(8, 3)
    return x, torch.sin(x[:, :1]) + 0.1 * torch.randn(8, 1)


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def build(method, model=None, likelihood=None, **options):
    likelihood = likelihood or en.GaussianLikelihood(precision=2.0)
    generator = torch.Generator().manual_seed(5)
    options = {**accepted(method, noise_ramp=0, reuse_noise=False), **options}
    return method(model or network(), num_data=N, likelihood=likelihood, generator=generator, **options)


def block(opt, x, y, scale=1.0, clear=True):
    with opt.sampled_params():
        if clear:
            opt.zero_grad()
        (scale * opt.likelihood.nll(opt.model(x), y)).backward()


def step(opt, x, y):
    block(opt, x, y)
    opt.step()


@torch.no_grad()
def means(opt):
    opt.blocks.swap.read()
    return [slot.mean.clone() for slot in opt.slots]


def flat_gradient(opt, slot):
    views = [p.grad for p in slot.layer.params]
    matrix = slot.empty()
    for view, grad in zip(slot.layer.views(matrix), views, strict=True):
        view.copy_(grad)
    return matrix


# One step.


@pytest.mark.parametrize("method", NATURAL)
@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("max_move", [None, 0.2])
def test_one_step_is_eq_9(data, method, damping, max_move):
    """With γ_ex = ``damping`` + α/(κ√η)·|V̄| where moves are bounded: v of the first step is the squared gradient."""
    opt = build(method, kl_weight=0.7, prior_var=0.5, lr=0.1, damping=damping, momentum=0.0, max_move=max_move)
    before = means(opt)
    block(opt, *data)
    drawn = [slot.sample.clone() for slot in opt.slots]
    gradients = [flat_gradient(opt, slot) for slot in opt.slots]
    opt.step()
    intrinsic = 0.7 / (N * 0.5)
    assert opt.slots[0].damping(opt.group) == pytest.approx(intrinsic)
    for slot, mean, W, gradient, after in zip(opt.slots, before, drawn, gradients, means(opt), strict=True):
        V = -gradient - intrinsic * W
        bound = 0.0 if max_move is None else 0.1 / (max_move * 0.5**0.5) * slot.fisher.rotate(V).abs()
        dense = slot.fisher.dense(intrinsic + damping + bound)
        expected = mean + 0.1 * torch.linalg.solve(dense, V.flatten()).reshape(mean.shape)
        torch.testing.assert_close(after, expected, **TOL)


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam])
def test_samples_have_the_posterior_covariance(data, method):
    opt = build(method, kl_weight=0.7, prior_var=0.5)
    for _ in range(12):
        step(opt, *data)
    count = 4000
    draws = []
    for _ in range(count):
        with opt.sampled_params(), torch.no_grad():
            draws.append(torch.cat([opt.model[0].weight, opt.model[0].bias[:, None]], -1).flatten())
    draws = torch.stack(draws)
    intrinsic = 0.7 / (N * 0.5)
    expected = 0.7 / N * torch.linalg.inv(opt.slots[0].fisher.dense(intrinsic))
    deviation = draws - means(opt)[0].flatten()
    measured = deviation.mT @ deviation / count
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected.square()) / count).sqrt()
    assert ((measured - expected).abs() < 5 * error).all()
    assert (deviation.mean(0).abs() < 5 * (expected.diagonal() / count).sqrt()).all()


def test_extrinsic_damping_stays_out_of_the_posterior(data):
    plain, damped = build(en.NoisyEKFAC, lr=0.0), build(en.NoisyEKFAC, lr=0.0, damping=10.0)
    for opt in (plain, damped):
        for _ in range(3):
            step(opt, *data)
    for name in ("0", "2"):
        ours, theirs = plain.posterior[name], damped.posterior[name]
        torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix, **TOL)
    torch.testing.assert_close(plain.kl(), damped.kl(), **TOL)


@pytest.mark.parametrize(("noisy", "plain"), [(en.NoisyEKFAC, en.EKFAC), (en.NoisyKFAC, en.KFAC)])
def test_without_kl_weight_noisy_methods_are_the_plain_ones(data, noisy, plain):
    one = build(noisy, kl_weight=1e-300, damping=0.1, fisher="exact", stats_every=1)
    other = build(plain, kl_weight=0.0, damping=0.1, fisher="exact", stats_every=1)
    for _ in range(15):
        step(one, *data)
        step(other, *data)
    for ours, theirs in zip(means(one), means(other), strict=True):
        torch.testing.assert_close(ours, theirs, **TOL)


def test_momentum_is_bias_corrected(data):
    """Where the gradient hardly changes, every step is a full one, the first included."""
    opt = build(en.EKFAC, momentum=0.9, lr=1e-7, layer_clip=None, damping=1.0, stats_every=1000)
    positions = [means(opt)]
    for _ in range(3):
        step(opt, *data)
        positions.append(means(opt))
    first = [new - old for new, old in zip(positions[1], positions[0], strict=True)]
    for i in (1, 2):
        for change, new, old in zip(first, positions[i + 1], positions[i], strict=True):
            torch.testing.assert_close(new - old, change, rtol=1e-4, atol=1e-14)


def test_momentum_averages_gradients(data):
    """Against momentum by hand, with the Fisher fixed after the first step."""
    opt = build(en.EKFAC, momentum=0.5, lr=0.1, max_move=None, damping=1.0, stats_every=1000, refresh_every=1000)
    x, y = data
    average = [torch.zeros_like(mean) for mean in means(opt)]
    for k in range(1, 4):
        before = means(opt)
        block(opt, x * k, y)
        gradients = [flat_gradient(opt, slot) + slot.damping(opt.group) * slot.mean for slot in opt.slots]
        opt.step()
        average = [0.5 * m + 0.5 * g for m, g in zip(average, gradients, strict=True)]
        for slot, m, old, new in zip(opt.slots, average, before, means(opt), strict=True):
            direction = slot.fisher.solve(m / (1 - 0.5**k), slot.damping(opt.group) + 1.0)
            torch.testing.assert_close(new, old - 0.1 * direction, **TOL)


# Clips.


def change_size(opt, before, lr):
    """α²·gᵀF⁻¹g = ΔᵀFΔ of the step just made, layer by layer."""
    sizes = []
    for slot, old, new in zip(opt.slots, before, means(opt), strict=True):
        delta = (new - old).flatten()
        sizes.append(delta @ slot.fisher.dense(slot.damping(opt.group)) @ delta)
    return torch.stack(sizes)


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam])
def test_clips_bound_the_change(data, method):
    for options, expected in (
        ({"layer_clip": 1e-4}, lambda sizes: sizes),
        ({"layer_clip": None, "kl_clip": 1e-4}, lambda sizes: sizes.sum()),
        ({"layer_clip": 1e-4, "kl_clip": 1.5e-4}, lambda sizes: sizes.sum() * 1e-4 / 1.5e-4),
    ):
        opt = build(method, lr=10.0, **PAPER_STEP, **options)
        before = means(opt)
        step(opt, *data)
        bounded = expected(change_size(opt, before, 10.0))
        torch.testing.assert_close(bounded, torch.full_like(bounded, 1e-4), **TOL)


def test_a_wide_clip_changes_nothing(data):
    free, wide = build(en.NoisyEKFAC, layer_clip=None), build(en.NoisyEKFAC, layer_clip=1e6, kl_clip=1e6)
    for opt in (free, wide):
        step(opt, *data)
    for ours, theirs in zip(means(free), means(wide), strict=True):
        torch.testing.assert_close(ours, theirs, **TOL)


# Weight samples.


@pytest.mark.parametrize("method", ALL)
def test_a_closure_equals_a_loop(data, method):
    x, y = data
    options = accepted(method, samples=3)
    loop, closed = build(method, **options), build(method, **options)

    def closure():
        closed.zero_grad()
        loss = closed.likelihood.nll(closed.model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        loop.zero_grad()
        for _ in range(loop.blocks_per_step):
            block(loop, x, y, clear=False)
        loop.step()
        loss = closed.step(closure)
    assert loss.ndim == 0
    for ours, theirs in zip(means(loop), means(closed), strict=True):
        torch.testing.assert_close(ours, theirs, **TOL)


@pytest.mark.parametrize("method", [en.NoisyEKFAC, en.NoisyKFAC, en.NoisyAdam, en.BayesByBackprop])
def test_antithetic_samples_mirror_each_other(data, method):
    opt = build(method, samples=4, antithetic=True)
    for _ in range(2):
        mean = means(opt)
        drawn = []
        opt.zero_grad()
        for _ in range(4):
            block(opt, *data, clear=False)
            drawn.append([slot.sample.clone() for slot in opt.slots])
        opt.step()
        for i, center in enumerate(mean):
            torch.testing.assert_close(drawn[0][i] + drawn[1][i], 2 * center, **TOL)
            torch.testing.assert_close(drawn[2][i] + drawn[3][i], 2 * center, **TOL)
            assert not torch.allclose(drawn[0][i], drawn[2][i])


def test_antithetic_needs_pairs():
    with pytest.raises(ValueError, match="samples must be even, got 3"):
        build(en.NoisyEKFAC, samples=3, antithetic=True)


@pytest.mark.parametrize("method", ALL)
def test_gradient_accumulation_equals_the_whole_batch(data, method):
    """Two halves with half the loss each; noise-free so that the weights are the same."""
    x, y = data
    options = {"init_std": 1e-12} if method is en.BayesByBackprop else {"kl_weight": 1e-300, "damping": 0.1}
    if method is not en.BayesByBackprop:
        options |= {"fisher": "exact", "stats_every": 1}
    whole, halves = build(method, **options), build(method, **options)
    for _ in range(4):
        step(whole, x, y)
        halves.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            block(halves, x[part], y[part], scale=0.5, clear=False)
        halves.step()
    for ours, theirs in zip(means(whole), means(halves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_accumulated_blocks_pull_toward_their_mean_sample(data):
    opt = build(en.NoisyEKFAC, momentum=0.0, layer_clip=None, prior_var=0.01, lr=1.0, **PAPER_STEP)
    x, y = data
    before = means(opt)
    drawn = []
    opt.zero_grad()
    for part in (slice(0, 4), slice(4, 8)):
        block(opt, x[part], y[part], scale=0.5, clear=False)
        drawn.append([slot.sample.clone() for slot in opt.slots])
    gradients = [flat_gradient(opt, slot) for slot in opt.slots]
    opt.step()
    for i, slot in enumerate(opt.slots):
        V = gradients[i] + slot.damping(opt.group) * (drawn[0][i] + drawn[1][i]) / 2
        expected = before[i] - slot.fisher.solve(V, slot.damping(opt.group))
        torch.testing.assert_close(means(opt)[i], expected, **TOL)


# Schedules and intervals.


def test_everything_can_be_scheduled(data):
    opt = build(en.NoisyEKFAC)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    lr = opt.param_groups[0]["lr"]
    step(opt, *data)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == lr / 2
    opt.param_groups[0].update(kl_weight=0.5, prior_var=2.0, num_data=200, ema_factors=0.5, ema_scale=0.25)
    assert opt.slots[0].damping(opt.group) == pytest.approx(0.5 / 400)
    assert opt.posterior_scale == pytest.approx(0.5 / 200)
    trace = opt.posterior["0"].covariance_matrix.trace()
    opt.param_groups[0]["kl_weight"] = 0.25
    assert opt.posterior["0"].covariance_matrix.trace() < trace
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr must be a finite number at least 0, got -1\.0"):
        block(opt, *data)


def test_statistics_are_taken_when_they_are_due(data):
    opt = build(en.NoisyEKFAC, stats_every=4, scale_every=2, refresh_every=8)
    seen = []
    for _ in range(9):
        before = {name: t.clone() for name, t in opt.slots[0].fisher.state().items()}
        step(opt, *data)
        after = opt.slots[0].fisher.state()
        seen.append({name for name, t in after.items() if not torch.equal(t, before[name])})
    everything = {"A", "S", "R", "q_in", "q_out", "values_in", "values_out"}
    assert seen[0] == {*everything, "updates", "has_basis"}
    assert seen[1] == seen[3] == seen[5] == seen[7] == set()
    assert seen[2] == seen[6] == {"R", "updates"}
    assert seen[4] == {"A", "S", "R", "updates"}
    assert seen[8] == {*everything, "updates"}


def test_reinitialisation_makes_ekfac_one_step_of_kfac(data):
    opt = build(en.NoisyEKFAC, reinit_every=3, stats_every=1, refresh_every=1)
    for k in range(7):
        step(opt, *data)
        fisher = opt.slots[0].fisher
        is_kfac = torch.allclose(
            fisher.dense(0.0), torch.kron(fisher.factors.out.moments, fisher.factors.inputs.moments)
        )
        assert is_kfac == (k % 3 == 0)


def test_spectra_are_those_of_the_layers(data):
    opt = build(en.NoisyEKFAC, stats_every=1, refresh_every=1)
    for _ in range(3):
        step(opt, *data)
    found = spectra(opt, points=5)
    assert list(found) == [slot.name for slot in opt.slots]
    for slot in opt.slots:
        own, fisher = found[slot.name], slot.fisher
        S, A = fisher.factors.out.moments, fisher.factors.inputs.moments
        products = torch.outer(torch.linalg.eigvalsh(S), torch.linalg.eigvalsh(A)).flatten().sort().values
        assert own["kfac"][0] == pytest.approx(float(products[0]), abs=1e-12)
        assert own["kfac"][-1] == pytest.approx(float(products[-1]))
        assert (own["R"][0], own["R"][-1]) == (float(fisher.R.min()), float(fisher.R.max()))
        assert own["R"] == sorted(own["R"])
        assert len(own["R"]) == len(own["kfac"]) == len(own["R where kfac"]) == 5
    assert spectra(build(en.NoisyAdam)) == spectra(build(en.NoisyKFAC)) == {}
    with pytest.raises(ValueError, match="points must be at least 2"):
        spectra(opt, points=1)


def test_a_form_of_damping_that_would_do_nothing_is_refused():
    for method in (en.NoisyEKFAC, en.EKFAC):
        with pytest.raises(ValueError, match="give reinit_every as well"):
            build(method, damping_form="factored")
    assert build(en.NoisyEKFAC, damping_form="factored", reinit_every=50).schedule.reinit_every == 50


def test_the_first_batches_weigh_alike(data):
    x, y = data
    opt = build(en.EKFAC, ema_factors=1e-9, ema_scale=1e-9, stats_every=1, lr=0.0)
    for k in range(1, 4):
        step(opt, x * k, y)
    one = torch.cat([x, torch.ones(8, 1)], -1)
    batches = [torch.cat([x * k, torch.ones(8, 1)], -1) for k in range(1, 4)]
    assert one.shape == batches[0].shape
    start = torch.eye(4) * (one.square().sum() / 8 / 4)  # the first batch's mean eigenvalue counts as one batch
    expected = (start + sum(a.mT @ a / 8 for a in batches)) / 4
    torch.testing.assert_close(opt.slots[0].fisher.factors.inputs.moments, expected, **TOL)
    pure = build(en.EKFAC, ema_factors=0.25, init=1.0, lr=0.0)
    step(pure, x, y)
    torch.testing.assert_close(
        pure.slots[0].fisher.factors.inputs.moments, 0.75 * torch.eye(4) + 0.25 * one.mT @ one / 8, **TOL
    )


# The start.


def test_before_the_first_statistics_the_posterior_is_the_prior():
    opt = build(en.NoisyEKFAC, kl_weight=0.7, prior_var=0.3)
    for q in opt.posterior.values():
        torch.testing.assert_close(q.variance, torch.full_like(q.variance, 0.3))
    weights = [p.detach().square().sum() for p in opt.model.parameters()]
    torch.testing.assert_close(opt.kl(), sum(weights) / (2 * 0.3))


def test_the_fisher_starts_at_the_scale_of_the_data():
    """A deep network whose gradients are tiny: R must not be what is left of an identity."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(20, 20), nn.ReLU())), nn.Linear(20, 4))
    x, y = torch.randn(500, 20), torch.randint(4, (500,))
    opt = en.EKFAC(model, num_data=500, likelihood="classification", lr=0.0)
    for k in range(101):
        rows = slice(k % 5 * 100, k % 5 * 100 + 100)
        step(opt, x[rows], y[rows])
    f = model(x).detach()
    p = f.softmax(-1)
    for slot in opt.slots[:-1]:
        truth = 0.0
        for c in range(4):  # tr F = Σ over classes of p_c·‖∂ log p_c‖², a mean over examples
            score = (torch.nn.functional.one_hot(torch.tensor(c), 4) - p) * p[:, c : c + 1].sqrt()
            weight = slot.layer.params[0]
            for i in range(0, 500, 50):
                (g,) = torch.autograd.grad(model(x[i : i + 1]), weight, score[i : i + 1])
                truth += float(g.square().sum()) / 10
        assert 0.3 < float(slot.fisher.R[:, :-1].sum()) / truth < 3


def test_the_noise_grows_along_a_ramp_in_training_only(data):
    opt = build(en.NoisyEKFAC, noise_ramp=4, lr=0.0, prior_var=0.5)
    sizes = []
    for _ in range(6):
        spread = (opt.posterior["0"].variance.sum()) ** 0.5
        mean = means(opt)[0]
        block(opt, *data)
        sizes.append(float((opt.slots[0].sample - mean).norm() / spread))
        opt.step()
    assert sizes[0] == 0.0
    for k, size in enumerate(sizes[1:], 1):
        assert 0.5 * min(k / 4, 1) < size < 1.6 * min(k / 4, 1)
    early = build(en.NoisyEKFAC, noise_ramp=1000)
    step(early, *data)
    with early.sampled_params(torch.Generator().manual_seed(0)):
        assert float((early.slots[0].sample - means_outside(early)[0]).norm()) > 0.1


def means_outside(opt):
    return [slot.mean for slot in opt.slots]


def test_noise_that_is_used_twice_mirrors_the_step_before(data):
    opt = build(en.NoisyEKFAC, reuse_noise=True, stats_every=100, guard=False)
    step(opt, *data)  # statistics: the noise of this step is not used again
    deviations = []
    for _ in range(4):
        mean = means(opt)
        block(opt, *data)
        deviations.append([slot.sample - m for slot, m in zip(opt.slots, mean, strict=True)])
        opt.step()
    for first, second, third in zip(*deviations[:3], strict=True):
        torch.testing.assert_close(second, -first, **TOL)
        assert not torch.allclose(third, first)


def test_noise_is_used_twice_only_while_the_covariance_stays(data):
    opt = build(en.NoisyEKFAC, reuse_noise=True, stats_every=100, guard=False)
    for change in (lambda: opt.param_groups[0].update(kl_weight=0.5), lambda: opt.slots[0].fisher.reinitialise(0.0)):
        step(opt, *data)
        step(opt, *data)
        mean = means(opt)[0]
        block(opt, *data)
        first = opt.slots[0].sample - mean
        opt.step()
        change()
        mean = means(opt)[0]
        block(opt, *data)
        assert not torch.allclose(opt.slots[0].sample - mean, -first, rtol=0.1)
        opt.step()
    with pytest.raises(ValueError, match="reuse_noise=True needs one sample a step"):
        build(en.NoisyEKFAC, reuse_noise=True, samples=2)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_run_that_reuses_noise_resumes_bit_for_bit(data, steps):
    def fresh():
        return build(en.NoisyEKFAC, reuse_noise=None, stats_every=5)

    whole, first, second = fresh(), fresh(), fresh()
    for _ in range(steps):
        step(first, *data)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for _ in range(steps):
        step(whole, *data)
    assert first.slots[0]._deviation is not None
    for _ in range(5):
        step(whole, *data)
        step(second, *data)
    for ours, theirs in zip(means(whole), means(second), strict=True):
        assert torch.equal(ours, theirs)


def test_by_default_noise_is_reused_where_it_can_be():
    assert en.NoisyEKFAC(network(), num_data=N, likelihood="regression").slots[0]._deviation is not None
    several = en.NoisyEKFAC(network(), num_data=N, likelihood="regression", samples=2)
    assert several.slots[0]._deviation is None
    assert build(en.EKFAC).slots[0]._deviation is None


def test_samples_that_reuse_noise_have_the_posterior_covariance(data):
    opt = build(en.NoisyEKFAC, reuse_noise=True, stats_every=100, lr=0.0, guard=False, **BAYES)
    step(opt, *data)
    draws = []
    for _ in range(4000):
        block(opt, *data)
        draws.append(opt.slots[0].sample.flatten().clone())
        opt.step()
        opt.steps = 1  # no statistics
    deviation = torch.stack(draws) - means(opt)[0].flatten()
    expected = 1 / N * torch.linalg.inv(opt.slots[0].fisher.dense(1 / N))
    measured = deviation.mT @ deviation / 4000
    error = 2**0.5 * ((expected.diagonal()[:, None] * expected.diagonal() + expected.square()) / 4000).sqrt()
    assert ((measured - expected).abs() < 5 * error).all()


# Stacks.


@pytest.mark.parametrize("method", [en.EKFAC, en.KFAC])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_stack_is_its_models_trained_apart(method, fisher):
    torch.manual_seed(7)
    s = 3
    x, y = torch.randn(s, 8, 3), torch.randn(s, 8, 1)
    stacked = en.models.MLP(3, [4], 1, stack=s)
    options = {"fisher": fisher, "stats_every": 2, "kl_clip": 1e-3, "lr": 0.1}
    every = {"refresh_every": 3} if method is en.EKFAC else {"refresh_every": 3, "damping_form": "factored"}
    together = build(method, stacked, en.GaussianLikelihood(stack=s), **options, **every)
    alone = []
    for i in range(s):
        model = en.models.MLP(3, [4], 1)
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), stacked.parameters(), strict=True):
                ours.copy_(theirs[i])
        alone.append(build(method, model, en.GaussianLikelihood(), **options, **every))
    for _ in range(8):
        step(together, x, y)
        for i, opt in enumerate(alone):
            step(opt, x[i], y[i])
    for i, opt in enumerate(alone):
        for ours, theirs in zip(opt.model.parameters(), stacked.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs[i], **TOL)
        torch.testing.assert_close(opt.kl(), together.kl()[i], **TOL)
        torch.testing.assert_close(opt.likelihood.tau, together.likelihood.tau[i], **TOL)


def test_noisy_stack_members_have_their_own_noise():
    stacked = en.models.MLP(3, [4], 1, stack=2)
    with torch.no_grad():
        for parameter in stacked.parameters():
            parameter[1] = parameter[0]
    opt = build(en.NoisyEKFAC, stacked, en.GaussianLikelihood(stack=2))
    with opt.sampled_params():
        assert not torch.allclose(stacked[0].weight[0], stacked[0].weight[1])


# The evidence lower bound.


@pytest.mark.parametrize("method", ALL)
def test_elbo_and_its_parts(data, method):
    x, y = data
    opt = build(method, likelihood=en.GaussianLikelihood(prior=(6.0, 6.0)), kl_weight=0.5, prior_var=0.7)
    with pytest.raises(RuntimeError, match=r"use elbo\(x, y\)"):
        opt.elbo_terms()
    for _ in range(5):
        step(opt, x, y)
    prior = [
        torch.distributions.kl_divergence(q, en.distributions.matrix_normal.isotropic(q.mean.shape, 0.7))
        for q in opt.posterior.values()
    ]
    terms = opt.elbo(x, y, samples=3)
    torch.testing.assert_close(terms.kl_weights, sum(prior), **TOL)
    torch.testing.assert_close(terms.kl_noise, opt.likelihood.kl(), **TOL)
    generator = torch.Generator().manual_seed(0)
    log_probs = []
    for _ in range(3):
        drawn = opt.sampled_params(generator) if opt.noisy else opt.posterior.sampled_params(opt.model, generator)
        with drawn, torch.no_grad():
            log_probs.append(opt.likelihood.log_prob(opt.model(x), y).mean())
    torch.testing.assert_close(terms.log_likelihood, N * torch.stack(log_probs).mean(), **TOL)
    torch.testing.assert_close(terms.value, terms.log_likelihood - 0.5 * terms.kl_weights - terms.kl_noise, **TOL)
    torch.testing.assert_close(terms.per_example, terms.value / N, **TOL)
    if not opt.noisy:
        with pytest.raises(RuntimeError, match="sampled weights"):
            opt.elbo_terms()
        return
    running = opt.elbo_terms()
    torch.testing.assert_close(running.kl_weights, terms.kl_weights, **TOL)
    assert torch.isfinite(running.value)
    assert not running.value.requires_grad


def test_kl_without_spread_is_refused(data):
    opt = build(en.EKFAC, kl_weight=0.0)
    with pytest.raises(ValueError, match="kl_weight=0"):
        opt.kl()


# Other likelihoods and layers learn something.


@pytest.mark.parametrize("method", ALL)
def test_classification_learns(method):
    torch.manual_seed(0)
    x = torch.randn(120, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    likelihood = en.CategoricalLikelihood()
    opt = method(model, num_data=120, likelihood=likelihood, lr=0.05, kl_weight=0.1)
    for _ in range(400):
        step(opt, x, y)
    predicted = en.predict(model, opt, x)
    assert (predicted.mode == y).double().mean() > 0.9
    assert predicted.log_prob(y).mean() > -0.45


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_every_fisher_learns(data, fisher):
    x, y = data
    opt = build(en.NoisyEKFAC, fisher=fisher, stats_every=1, likelihood=en.GaussianLikelihood())
    before = opt.elbo(x, y).value
    for _ in range(150):
        step(opt, x, y)
    assert opt.elbo(x, y).value > before + 10

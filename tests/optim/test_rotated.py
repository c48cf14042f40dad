"""Layers kept in their eigenbasis: the same numbers as layers kept as weights, and nobody who looks can tell."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import eigenoise as en
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.optim import rotated
from eigenoise.optim.decomposition_schedule import turns
from eigenoise.optim.rotated import Rotated

METHODS = [en.NoisyEKFAC, en.NoisyKFAC, en.EKFAC, en.KFAC]


class Twice(nn.Module):
    """A layer that is called twice, once in a checkpoint, and a weight that is also used directly."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2, bias=False)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.tanh(checkpoint(self.body, h, use_reentrant=False))
        return self.last(torch.tanh(self.body(h))) + functional.linear(h, self.last.weight) * 0.1


def vectors():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))


def images():
    return nn.Sequential(
        nn.Unflatten(1, (2, 3, 3)),
        nn.Conv2d(2, 4, 2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def tokens():
    return nn.Sequential(
        nn.Unflatten(1, (3, 3)), nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2), nn.Flatten(), nn.Linear(6, 2)
    )


MODELS = {"vectors": (vectors, 5), "images": (images, 18), "tokens": (tokens, 9), "twice": (Twice, 5)}


def build(kind: str, method=en.NoisyEKFAC, *, eigenbasis=True, batch=80, **options):
    torch.manual_seed(1)
    make, inputs = MODELS[kind]
    model = make()
    x, y = torch.randn(batch, inputs), torch.randn(batch, 2)
    refresh = "inv_every" if method in (en.NoisyKFAC, en.KFAC) else "eig_every"
    options = {"stats_every": 2, refresh: 4, "lr": 0.02, "noise": "shared", **options}
    generator = torch.Generator().manual_seed(3)
    opt = method(
        model, num_data=90, likelihood=en.GaussianLikelihood(), generator=generator, eigenbasis=eigenbasis, **options
    )
    return opt, x, y


def train(opt, x, y, steps=10, penalty=0.0, look=lambda opt: None):
    for _ in range(steps):
        opt.zero_grad()
        for _ in range(opt.blocks_per_step):
            with opt.sampled_params():
                loss = opt.likelihood.nll(opt.model(x), y)
                if penalty:
                    loss = loss + penalty * sum(p.square().sum() for p in opt.model.parameters())
                loss.backward()
                look(opt)
        look(opt)
        opt.step()
        look(opt)


def weights(opt):
    return [p.detach().clone() for p in opt.model.parameters()]


def assert_same(one, other, tolerance=1e-9):
    for a, b in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(one.kl(), other.kl(), atol=1e-7, rtol=1e-7)


# The same numbers.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_the_same_as_with_weights(kind, method):
    one, other = (build(kind, method, eigenbasis=kept) for kept in (True, False))
    train(*one)
    train(*other)
    assert all(type(p) is Rotated for p in one[0].model.parameters())
    assert_same(one[0], other[0])


@pytest.mark.parametrize("options", [{"samples": 3}, {"samples": 2, "antithetic": True}, {"kl_clip": 1e-3}])
def test_several_samples_are_the_same_as_with_weights(options):
    one, other = (build("vectors", eigenbasis=kept, **options) for kept in (True, False))
    train(*one)
    train(*other)
    assert_same(one[0], other[0])


def test_few_rows_of_sequences_and_second_derivatives_are_the_same_as_with_weights():
    results = []
    for kept in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))
        opt = en.NoisyEKFAC(
            model,
            num_data=10,
            likelihood=en.GaussianLikelihood(),
            eigenbasis=kept,
            noise="shared",
            stats_every=100,
            generator=torch.Generator().manual_seed(0),
        )
        for examples in (60, 2, 2, 2):  # enough for a basis, then so few that no weight is formed
            x, y = torch.randn(examples, 2, 20, requires_grad=True), torch.randn(examples, 2)
            with opt.sampled_params():
                opt.zero_grad()
                loss = opt.likelihood.nll(model(x).sum(1), y)
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                (loss + slope.square().sum()).backward()
            opt.step()
        results.append(opt)
    assert_same(*results)


def test_a_second_derivative_through_fresh_noise_is_around_the_mean_even_if_later_calls_share_a_sample():
    torch.manual_seed(0)
    layer = nn.Linear(20, 30)
    opt = en.NoisyEKFAC(
        layer, num_data=10, likelihood=en.GaussianLikelihood(), eigenbasis=True, stats_every=10**6, eig_every=10**6
    )
    with opt.sampled_params():  # the first step takes statistics
        opt.zero_grad()
        opt.likelihood.nll(layer(torch.randn(60, 20)), torch.randn(60, 30)).backward()
    opt.step()
    mean = layer.weight.detach().clone()
    x = torch.randn(2, 20, requires_grad=True)
    with opt.sampled_params():
        out = layer(x)
        penalty = layer.weight.square().sum()  # from here on there is a sample that all share
        (slope,) = torch.autograd.grad(out.sum() - 0.0 * penalty, x, create_graph=True)
        (plain,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        torch.testing.assert_close(slope.detach(), plain)
    assert mean.shape == layer.weight.shape


def test_statistics_do_not_compute_gradients_by_weights(monkeypatch):
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 25))
    opt = en.NoisyEKFAC(model, num_data=10, likelihood=en.GaussianLikelihood(), eigenbasis=True, stats_every=1)
    seen = []
    backward = rotated._Rows.backward

    def watched(ctx, *grads):
        found = backward(ctx, *grads)
        seen.append(found[3] is not None)
        return found

    monkeypatch.setattr(rotated._Rows, "backward", staticmethod(watched))
    with opt.sampled_params():
        opt.likelihood.nll(model(torch.randn(4, 20)), torch.randn(4, 25)).backward()
    assert seen == [False, True, True]  # statistics need not go below the first layer's output
    assert all(slot.keeper.weights_wanted for slot in opt.slots)


def test_noise_for_every_example_works_under_autocast():
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 25))
    for method in (en.NoisyEKFAC, en.NoisyAdam):
        opt = method(
            model, num_data=10, likelihood=en.GaussianLikelihood(), noise="per-example", stats_every=2, lr=1e-3
        )
        for _ in range(4):
            with opt.sampled_params():
                opt.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = opt.likelihood.nll(model(torch.randn(6, 20)), torch.randn(6, 25))
                loss.backward()
                assert all(p.grad.dtype is torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())
            opt.step()
        del opt


def test_a_fixed_input_is_the_same_as_with_weights():
    one, other = (build("vectors", eigenbasis=kept, fixed_inputs=["0", "2"]) for kept in (True, False))
    for opt, x, y in (one, other):
        train(opt, x, y, steps=5)
        train(opt, x[:3], y[:3], steps=3)  # so few that no weight is formed, and no basis is due
    assert torch.equal(one[0].slots[0].fisher.factors.q_in, torch.eye(6))
    assert_same(one[0], other[0])


def test_a_fixed_input_must_be_a_structured_layer_of_ekfac():
    with pytest.raises(ValueError, match=r"fixed_inputs names \['9'\]"):
        build("vectors", fixed_inputs=["0", "9"])
    with pytest.raises(ValueError, match="fixed_inputs is for EK-FAC alone"):
        build("vectors", en.NoisyKFAC, fixed_inputs=["0"])
    with pytest.raises(ValueError, match="use reinit_every=None"):
        build("vectors", fixed_inputs=["0"], reinit_every=50)


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_a_loss_that_uses_weights_directly_has_the_right_gradient(kind):
    one, other = (build(kind, eigenbasis=kept) for kept in (True, False))
    train(*one, penalty=0.1)
    train(*other, penalty=0.1)
    assert_same(one[0], other[0])


def test_a_gradient_penalty_has_the_right_gradient():
    results = []
    for kept in (True, False):
        opt, x, y = build("vectors", eigenbasis=kept)
        x.requires_grad_()
        for _ in range(5):
            opt.zero_grad()
            with opt.sampled_params():
                f = opt.model(x)
                (slope,) = torch.autograd.grad(f.sum(), x, create_graph=True)
                (opt.likelihood.nll(f, y) + slope.square().mean()).backward()
            opt.step()
        results.append(opt)
    assert_same(*results)


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_and_many_give_the_same(rows, bias, monkeypatch):
    layer = nn.Linear(9, 6, bias=bias)
    options = {"eigenbasis": True, "eig_every": 1, "noise": "shared"}
    opt = en.NoisyEKFAC(layer, num_data=50, likelihood=en.GaussianLikelihood(), **options)
    train(opt, torch.randn(60, 9), torch.randn(60, 6), steps=2)
    x = torch.randn(rows, 9, requires_grad=True)
    formed = []
    form = rotated.Keeper.formed
    monkeypatch.setattr(rotated.Keeper, "formed", lambda self: formed.append(1) or form(self))
    with opt.sampled_params():
        opt.zero_grad()
        f = layer(x)
        used = bool(formed)
        f.square().sum().backward()
        weight = layer.weight.detach().clone()
        offset = layer.bias.detach().clone() if bias else None
        expected = functional.linear(x.detach(), weight, offset)
        torch.testing.assert_close(f, expected)
        torch.testing.assert_close(x.grad, 2 * expected @ weight)
        gradient = 2 * expected.mT @ functional.pad(x.detach(), (0, 1), value=1.0)[:, : 9 + bias]
    slot = opt.slots[0]
    own = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1) if bias else layer.weight.grad
    torch.testing.assert_close(own, slot.fisher.rotate(gradient))
    torch.testing.assert_close(own.norm(), gradient.norm())
    assert used == (rows == 200)


def test_autocast_forms_the_weight_in_full_precision():
    opt, x, y = build("vectors", batch=2)
    opt.model.float()
    opt = en.NoisyEKFAC(opt.model, num_data=50, likelihood=en.GaussianLikelihood(), eigenbasis=True)
    with opt.sampled_params():
        exact = opt.model(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            f = opt.model(x.float())
            opt.likelihood.nll(f.float(), y.float()).backward()
    assert f.dtype == torch.bfloat16
    torch.testing.assert_close(f.float(), exact, atol=0.05, rtol=0.05)
    assert opt.model[0].weight.grad.dtype == torch.float32
    opt.step()


# The cost.


@pytest.mark.parametrize(("kind", "batch", "rotations"), [("vectors", 2, 0), ("images", 40, 2)])
def test_a_step_rotates_each_matrix_twice_or_not_at_all(kind, batch, rotations, monkeypatch):
    opt, x, y = build(kind, batch=batch, stats_every=100, eig_every=100)
    train(opt, x, y, steps=2)
    count = []
    for name in ("rotate", "unrotate"):
        original = getattr(KroneckerFactors, name)
        monkeypatch.setattr(KroneckerFactors, name, lambda *a, f=original: count.append(1) or f(*a))
    train(opt, x, y, steps=1)
    assert len(count) == rotations * len(opt.slots)


# Looking.

LOOKS = {
    "state_dict": lambda opt: dict(opt.model.state_dict()),
    "detach": lambda opt: {k: p.detach() for k, p in opt.model.named_parameters()},
    "data": lambda opt: {k: p.data for k, p in opt.model.named_parameters()},
    "arithmetic": lambda opt: {k: p * 1.0 for k, p in opt.model.named_parameters()},
    "numpy": lambda opt: {k: torch.from_numpy(p.detach().numpy()) for k, p in opt.model.named_parameters()},
    "copy_": lambda opt: {k: torch.empty(p.shape).copy_(p) for k, p in opt.model.named_parameters()},
    "foreach": lambda opt: dict(
        zip(dict(opt.model.named_parameters()), torch._foreach_mul(list(opt.model.parameters()), 1.0), strict=True)
    ),
    "deepcopy": lambda opt: dict(copy.deepcopy(opt.model).named_parameters()),
    "pickle": lambda opt: dict(pickle.loads(pickle.dumps(opt.model)).named_parameters()),
    "close": lambda opt: opt.close() or dict(opt.model.named_parameters()),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_who_looks_sees_the_mean(kind, look):
    opt, x, y = build(kind)
    train(opt, x, y)
    expected = opt.posterior.mean
    for name, seen in LOOKS[look](opt).items():
        torch.testing.assert_close(seen.detach(), expected[name], atol=1e-12, rtol=0.0)
        assert type(seen) is not Rotated


def test_a_forward_pass_outside_a_block_uses_the_mean():
    opt, x, y = build("images")
    train(opt, x, y)
    twin = build("images", eigenbasis=False)[0]
    opt.posterior.load_into(twin.model)
    train(opt, x, y, steps=1)
    before = opt.model(x)
    opt.posterior.load_into(twin.model)
    torch.testing.assert_close(before, twin.model(x))


def test_who_looks_within_a_block_sees_the_sample():
    opt, x, y = build("vectors")
    train(opt, x, y)
    mean = opt.posterior.mean
    with opt.sampled_params():
        seen = {name: p.detach().clone() for name, p in opt.model.named_parameters()}
        inner = copy.deepcopy(opt.model)
        f = opt.model(x)
    assert all(not torch.equal(seen[name], mean[name]) for name in seen)
    torch.testing.assert_close(f, inner(x))
    assert all(torch.equal(p, seen[name]) for name, p in inner.named_parameters())


def test_looking_changes_nothing():
    one, other = build("images"), build("images")
    train(*one)
    train(*other, look=lambda opt: [p.detach().norm() for p in opt.model.parameters()])
    for a, b in zip(weights(one[0]), weights(other[0]), strict=True):
        assert torch.equal(a, b)


def test_what_does_not_need_a_value_does_not_look():
    opt, x, y = build("vectors")
    train(opt, x, y)
    for p in opt.model.parameters():
        assert (p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf) == (
            p.grad.shape, torch.float64, torch.device("cpu"), True, True,
        )  # fmt: skip
        assert p in {p: 1}
    nn.utils.clip_grad_norm_(opt.model.parameters(), 1.0)
    opt.zero_grad(set_to_none=False)
    assert all(type(p) is Rotated for p in opt.model.parameters())


@pytest.mark.parametrize("change", ["load_state_dict", "data", "copy_"])
def test_weights_that_a_user_changes_are_trained_from(change):
    opt, x, y = build("vectors")
    train(opt, x, y)
    wanted = {name: torch.randn_like(p) for name, p in opt.model.state_dict().items()}
    train(opt, x, y, steps=1)
    if change == "load_state_dict":
        opt.model.load_state_dict(wanted)
    for name, p in opt.model.named_parameters():
        if change == "data":
            p.data = wanted[name].clone()
        elif change == "copy_":
            with torch.no_grad():
                p.copy_(wanted[name])
    for name, mean in opt.posterior.mean.items():
        torch.testing.assert_close(mean, wanted[name])
    with opt.sampled_params():
        assert torch.isfinite(opt.model(x)).all()
    for name, p in opt.model.named_parameters():
        assert torch.equal(p, wanted[name])  # to the last bit, until a step moves them


def test_a_state_alone_leaves_the_weights_as_they_are():
    opt, x, y = build("vectors")
    train(opt, x, y, steps=3)
    state = copy.deepcopy(opt.state_dict())
    train(opt, x, y, steps=3)
    before = weights(opt)
    opt.load_state_dict(state)
    for a, b in zip(weights(opt), before, strict=True):
        torch.testing.assert_close(a, b)


def test_one_batch_after_the_other_in_one_block():
    one, other = (build("images", eigenbasis=kept) for kept in (True, False))
    for opt, x, y in (one, other):
        for _ in range(4):
            opt.zero_grad()
            with opt.sampled_params():
                for part in range(2):
                    (0.5 * opt.likelihood.nll(opt.model(x[part::2]), y[part::2])).backward()
            opt.step()
    assert_same(one[0], other[0])


# Which layers.


def test_large_layers_are_kept_in_their_basis_by_default():
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3))
    opt = en.NoisyEKFAC(model, num_data=10, likelihood=en.GaussianLikelihood())
    assert [slot.rotated for slot in opt.slots] == [True, False]
    opt = en.NoisyAdam(model, num_data=10, likelihood=en.GaussianLikelihood(), eigenbasis=True)
    assert [slot.rotated for slot in opt.slots] == [False, False]


def test_samples_side_by_side_are_kept_as_weights():
    model = en.models.MLP(200, [200], 1, stack=2)
    likelihood = en.GaussianLikelihood(stack=2)
    opt = en.NoisyEKFAC(model, num_data=10, likelihood=likelihood, parallel=True, samples=2)
    assert not any(slot.rotated for slot in opt.slots)


def test_a_stack_can_be_kept_in_its_basis():
    results = []
    for kept in (True, False):
        torch.manual_seed(0)
        model, likelihood = en.models.MLP(4, [5], 1, stack=3), en.GaussianLikelihood(stack=3)
        opt = en.NoisyEKFAC(
            model, num_data=50, likelihood=likelihood, eigenbasis=kept, generator=torch.Generator().manual_seed(1)
        )
        train(opt, torch.randn(3, 40, 4), torch.randn(3, 40, 1))
        results.append(opt)
    assert_same(*results)


# Turns.


def test_large_decompositions_take_turns(monkeypatch):
    monkeypatch.setattr("eigenoise.optim.decomposition_schedule.AT_ONCE", 0)
    model = nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 20), nn.Linear(20, 2))
    opt = en.NoisyEKFAC(model, num_data=50, likelihood=en.GaussianLikelihood(), eig_every=6, stats_every=1)
    x, y = torch.randn(60, 20), torch.randn(60, 2)
    seen = []
    for _ in range(12):
        before = [slot.fisher.factors.q_in.clone() for slot in opt.slots]
        train(opt, x, y, steps=1)
        seen.append([i for i, slot in enumerate(opt.slots) if not torch.equal(before[i], slot.fisher.factors.q_in)])
    assert seen == 2 * [[], [0], [1, 2], [3], [], []]


@pytest.mark.parametrize(
    ("costs", "every", "stats_every", "expected"),
    [
        ([9, 9, 9], 10, 5, {0: [0, 1, 2]}),  # all together cost no more than one step may do
        ([100, 100, 100], 10, 5, {0: [], 1: [0], 2: [1], 3: [2]}),
        ([20, 300, 400, 20, 380], 10, 2, {0: [0], 1: [1], 3: [2], 5: [3, 4]}),
        ([100] * 7, 4, 1, {0: [], 1: [0, 1], 2: [2, 3], 3: [4, 5, 6]}),  # statistics at every step
        ([100] * 7, 3, 2, {0: [0], 1: [1, 2, 3, 4, 5, 6]}),
        ([100] * 7, 1, 1, {0: [0, 1, 2, 3, 4, 5, 6]}),
        ([100] * 3, 10**15, 10**12, {0: [], 1: [0], 2: [1], 3: [2]}),  # as good as never
        ([], 5, 1, {0: []}),
    ],
)
def test_turns(monkeypatch, costs, every, stats_every, expected):
    monkeypatch.setattr("eigenoise.optim.decomposition_schedule.AT_ONCE", 27)
    assert turns(costs, every, (stats_every, 10**9)) == expected
    assert turns(costs, every, (10**9, stats_every)) == expected


def kept(dtype=torch.float64, **options):
    """A model of one layer kept in its basis, and its optimiser."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    likelihood = en.GaussianLikelihood(precision=1.0)
    options = {"num_data": 100, "likelihood": likelihood, "generator": generator, "eigenbasis": True, **options}
    return model, en.NoisyEKFAC(model, **options)


def batch():
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(5))
    return x, x[:, :1].clone()


def one_step(model, opt, x, y):
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y).backward()
    opt.step()


@pytest.mark.parametrize("look", ["kl", "state_dict", "predict", "step", "posterior"])
def test_a_second_optimiser_of_the_model_starts_where_the_first_is_and_its_steps_count(look):
    model, first = kept()
    x, y = batch()
    for _ in range(12):
        one_step(model, first, x, y)
    second = en.NoisyEKFAC(model, num_data=100, likelihood=first.likelihood, eigenbasis=True)
    if look == "predict":
        en.predict(model, first, x, samples=2)
    elif look == "step":
        one_step(model, first, x, y)
    elif look == "posterior":
        assert first.posterior
    else:
        getattr(first, look)()
    second.kl()
    now = model[0].weight.detach().clone()
    torch.testing.assert_close(second.slots[0].weights(second.slots[0].mean)[:, :-1], now)
    one_step(model, second, x, y)
    moved = model[0].weight.detach().clone()
    assert not torch.equal(moved, now)
    first.kl()
    torch.testing.assert_close(first.slots[0].weights(first.slots[0].mean)[:, :-1], moved)
    torch.testing.assert_close(model[0].weight.detach(), moved)


@pytest.mark.parametrize("what", ["posterior", "state_dict", "kl", "step"])
def test_what_is_looked_at_under_autocast_is_not_rounded(what):
    model, opt = kept(dtype=torch.float32)
    x, y = (part.float() for part in batch())
    for _ in range(12):
        one_step(model, opt, x, y)
    if what == "step":
        opt.param_groups[0]["lr"] = 0.0
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()
    before = model[0].weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        found = opt.posterior if what == "posterior" else getattr(opt, what)()
    if what == "posterior":
        assert torch.equal(found["0"].variance, opt.posterior["0"].variance)
    torch.testing.assert_close(model[0].weight.detach(), before, rtol=0, atol=1e-6)


def test_a_step_that_fails_at_a_new_basis_leaves_the_same_whether_someone_looks_or_not():
    def trained(looked):
        model, opt = kept(not_finite="skip", eig_every=7, stats_every=10)
        x, y = batch()
        for k in range(30):
            one_step(model, opt, x, y * (torch.nan if k == 14 else 1))
            if k in looked:
                model.state_dict()
        assert opt.skipped == 1
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    with pytest.warns(RuntimeWarning):
        never, then = trained(()), trained((13, 14))
    assert torch.equal(never, then)


def test_a_load_that_is_refused_in_a_block_leaves_the_sample_in_place():
    model, opt = kept(noise="shared")
    x, y = batch()
    for _ in range(12):
        one_step(model, opt, x, y)
    state = copy.deepcopy(opt.state_dict())
    opt.zero_grad()
    with opt.sampled_params(), torch.no_grad():
        before = model(x)
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside sampled_params"):
            opt.load_state_dict(state)
        assert torch.equal(model(x), before)

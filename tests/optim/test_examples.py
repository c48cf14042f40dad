"""Rows of a layer and the examples they belong to: R against the dense Fisher, whatever becomes of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigenoise as en
from eigenoise.layers.matrix_layer import Grouping, as_matrix_layer
from eigenoise.optim.examples import _agreement

C = 3
DRAWS = 600


class Tokens(nn.Module):
    """Inputs (b, t, 4): a layer on tokens, perhaps mixed by attention or flattened first, then pooled or not."""

    def __init__(self, mix: bool = False, flatten: bool = False, pool: bool = True, sequence_first: bool = False):
        super().__init__()
        self.tokens, self.head = nn.Linear(4, 5), nn.Linear(5, C)
        self.mix, self.flatten, self.pool, self.sequence_first = mix, flatten, pool, sequence_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.flatten else self.tokens(x)
        h = h.tanh()
        h = h.transpose(0, 1) if self.sequence_first else h
        if self.mix:
            h = (h @ h.mT).softmax(-1) @ h
        if self.pool:
            return self.head(h.mean(1))
        f = self.head(h)
        return f.transpose(0, 1) if self.sequence_first else f


class Graphs(nn.Module):
    """Nodes (m, 4) of unequal graphs; classes of graphs, or of nodes."""

    def __init__(self, sizes: list[int], nodes: bool = False):
        super().__init__()
        self.first, self.head, self.nodes = nn.Linear(4, 5), nn.Linear(5, C), nodes
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        same = (owner[:, None] == owner[None, :]).double()
        self.adjacency = same / same.sum(1, keepdim=True)
        pool = torch.zeros(len(sizes), len(owner)).double().scatter_(0, owner[None, :], 1.0)
        self.pool = pool / pool.sum(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.adjacency @ self.first(x)).tanh()
        return self.head(h if self.nodes else self.pool @ h)


class Siamese(nn.Module):
    """Pairs (b, 2, 4), both halves in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.body(torch.cat([x[:, 0], x[:, 1]])).tanh().chunk(2)
        return self.head(one * other)


class Uneven(nn.Module):
    """One layer called with batches of different sizes, the second of which all examples use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() + self.body(x[:2]).mean(0))


class Masked(nn.Module):
    """Tokens of which only some have a target."""

    def __init__(self, keep: Tensor):
        super().__init__()
        self.inner, self.keep = Tokens(mix=True, pool=False), keep

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[self.keep]


class FlatLogits(nn.Module):
    """Logits of all tokens, flattened to (b·t, c)."""

    def __init__(self, mix: bool) -> None:
        super().__init__()
        self.inner = Tokens(mix=mix, pool=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).flatten(0, 1)


MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], bool]] = {  # whether every layer's rows are matched
    "vectors": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)), (6, 4), {}, True),
    "tokens": (Tokens, (3, 4, 4), {}, True),
    "tokens, mixed": (lambda: Tokens(mix=True), (3, 4, 4), {}, True),
    "tokens as rows": (lambda: Tokens(flatten=True), (3, 4, 4), {}, True),
    "sequence first": (lambda: Tokens(sequence_first=True, mix=True), (4, 3, 4), {}, True),
    "sequence first as rows": (lambda: Tokens(sequence_first=True, flatten=True), (4, 3, 4), {}, True),
    "a target for every token, sequence first": (
        lambda: Tokens(sequence_first=True, mix=True, pool=False),
        (4, 3, 4),
        {"batch_dim": 1},
        True,
    ),
    "the same, batch_dim left out": (
        lambda: Tokens(sequence_first=True, mix=True, pool=False),
        (4, 3, 4),
        {},
        False,
    ),
    "logits flattened": (lambda: FlatLogits(mix=False), (3, 4, 4), {}, True),
    "logits flattened, mixed": (lambda: FlatLogits(mix=True), (3, 4, 4), {}, False),
    "masked tokens": (lambda: Masked(MASK), (3, 4, 4), {}, False),
    "graphs": (lambda: Graphs([1, 5, 2, 3]), (11, 4), {}, False),
    "graphs whose sizes add up to a multiple": (lambda: Graphs([1, 5, 2, 4]), (12, 4), {}, False),
    "nodes": (lambda: Graphs([1, 5, 2, 3], nodes=True), (11, 4), {}, False),
    "pairs": (Siamese, (5, 2, 4), {}, True),
    "uneven calls": (Uneven, (5, 4), {}, False),
    "no batch": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)), (7, 4), {}, True),
}
every_case = pytest.mark.parametrize("case", CASES)


def dense_blocks(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The mean over likelihood terms of Jᵀ·(diag(p) − ppᵀ)·J, for each layer's matrix with its bias as last column."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda own: torch.func.functional_call(model, own, (x,)).reshape(-1, C))(params)
    p = model(x).detach().reshape(-1, C).softmax(-1)
    output = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    blocks = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            J = torch.cat([jacobian[f"{name}.weight"], jacobian[f"{name}.bias"].unsqueeze(-1)], -1).flatten(2)
            blocks[name] = torch.einsum("tci,tcd,tdj->ij", J, output, J) / len(p)
    return blocks


def build(model: nn.Module, fisher: str, method: Any = en.EKFAC, **options: Any) -> Any:
    settings = {"num_data": 50, "lr": 0.0, "ema_scale": 1.0, "stats_every": 1, "guard": False, "stats_fraction": 1.0}
    settings |= (
        {"ema_factors": 1.0, "refresh_every": 10**6} if method is en.EKFAC else {"kl_weight": 0.0, "damping": 1.0}
    )
    generator = torch.Generator().manual_seed(1)
    settings |= {"likelihood": "classification", "init": 1.0, "generator": generator, "fisher": fisher}
    return method(model, **settings, **options)


def step(opt: Any, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(opt.model(x), y).backward()
    opt.step()


def problem(case: str) -> tuple[nn.Module, Tensor, Tensor, dict[str, Any], bool]:
    make, shape, options, matched = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    return model, x, torch.randint(C, model(x).shape[:-1]), options, matched


DRAWN = ["tokens, mixed", "logits flattened, mixed", "masked tokens", "graphs", "nodes"]


@pytest.mark.parametrize(
    ("case", "fisher"), [*((case, "exact") for case in CASES), *((case, "sampled") for case in DRAWN)]
)
def test_r_is_the_dense_fishers(case, fisher):
    model, x, y, options, matched = problem(case)
    opt = build(model, fisher, **options)
    step(opt, x, y)  # a basis to look from
    blocks = dense_blocks(model, x)
    wanted = {}
    for slot in opt.slots:
        Q = torch.kron(slot.fisher.factors.q_out, slot.fisher.factors.q_in)
        wanted[slot.name] = (Q.mT @ blocks[slot.name] @ Q).diagonal().reshape(slot.fisher.R.shape)
    exact = matched and fisher == "exact" and y.ndim == 1
    total = {name: torch.zeros_like(value) for name, value in wanted.items()}
    squares = dict.fromkeys(wanted, 0.0)
    for _ in range(1 if exact else DRAWS):
        step(opt, x, y)
        for slot in opt.slots:
            total[slot.name] += slot.fisher.R
            squares[slot.name] += float(slot.fisher.R.sum()) ** 2
    for name, value in wanted.items():
        mean = total[name] / (1 if exact else DRAWS)
        if exact:
            torch.testing.assert_close(mean, value, rtol=1e-8, atol=1e-10)
            continue
        ratio = float(mean.sum() / value.sum())
        spread = max(squares[name] / DRAWS - float(mean.sum()) ** 2, 0.0) ** 0.5 / float(value.sum())
        assert abs(ratio - 1) < 5 * spread / DRAWS**0.5 + 1e-9, f"{name}: {ratio} ± {spread / DRAWS**0.5}"
        assert spread / DRAWS**0.5 < 0.06  # so that a wrong matching would show
        assert torch.nn.functional.cosine_similarity(mean.flatten(), value.flatten(), dim=0) > 0.95


@every_case
def test_rows_are_matched_where_they_belong_to_one_example(case):
    model, x, y, options, matched = problem(case)
    opt = build(model, "sampled", **options)
    step(opt, x, y)
    groupings = list(opt.statistics.matcher._known.values())
    assert all(way is not None for way in groupings) == matched
    if case == "pairs":
        assert Grouping(0, inner=True) in groupings


def test_shapes_are_verified_once(monkeypatch):
    model, x, y, _, _ = problem("tokens")
    opt = build(model, "sampled")
    passes = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: passes.append(1) or grad(*args, **more))
    for batch, expected in ((x, 1 + 22), (x, 1), (x[:2], 1 + 32), (x, 1)):  # 64 signs, 3 or 2 at a time
        passes.clear()
        step(opt, batch, y[: len(batch)])
        assert len(passes) == expected


def test_rows_that_batch_norm_couples_are_examples_all_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    model.append(nn.Linear(8, C))
    opt = build(model, "sampled")
    step(opt, torch.randn(64, 4), torch.randint(C, (64,)))
    assert set(opt.statistics.matcher._known.values()) == {Grouping(0)}


def test_the_matching_draws_nothing_from_the_optimisers_generator():
    model, x, y, _, _ = problem("pairs")
    opt = build(model, "sampled")
    states = []
    for _ in range(2):
        opt.generator.manual_seed(0)
        step(opt, x, y)
        states.append(opt.generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("method", [en.EKFAC, en.NoisyAdam])
def test_a_convolution_on_patches_of_unknown_owners_is_unbiased(method, monkeypatch):
    """Images of unequal numbers of crops, unfolded a few at a time."""
    monkeypatch.setattr("eigenoise.optim.statistics.MAX_ACTIVATIONS_PER_CHUNK", 1)
    torch.manual_seed(0)

    class Crops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 2, 2), nn.Linear(2, C)
            self.pool = torch.tensor([[1.0, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0, 0, 0.5, 0.5]])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.pool @ self.conv(x).tanh().mean((-2, -1)))

    model, x, y = Crops(), torch.randn(5, 1, 3, 3), torch.randint(C, (3,))
    opt = build(model, "sampled", method)
    slot = opt.slots[0]
    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda own: torch.func.functional_call(model, own, (x,)))(params)
    J = torch.cat([jacobian["conv.weight"].flatten(3), jacobian["conv.bias"].unsqueeze(-1)], -1)
    p = model(x).detach().softmax(-1)
    output = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    wanted = torch.einsum("tcpn,tcd,tdpn->", J, output, J) / 3
    traces = []
    for _ in range(1000):
        step(opt, x, y)
        traces.append(float(slot.fisher.spectrum(0.0).sum()))
    error = torch.tensor(traces).std() / len(traces) ** 0.5
    assert abs(sum(traces) / len(traces) - float(wanted)) < 4 * float(error)
    assert float(error) < 0.08 * float(wanted)


@pytest.mark.parametrize("size", [1.0, 1e-27])
def test_examples_with_hardly_a_gradient_have_no_say(size):
    """A confident model's gradients span more than float32 can keep the digits of."""
    torch.manual_seed(0)
    layer = as_matrix_layer("layer", nn.Linear(4, 5))
    assert layer is not None
    first, signs = size * torch.randn(8, 5, dtype=torch.float32), torch.tensor([1.0, -1.0] * 4)
    first[0] *= 1e-10
    second = first * signs[:, None].float()
    second[0] *= -0.5
    assert float(_agreement(layer, first, second, signs, Grouping(0))) == pytest.approx(1.0, abs=1e-6)
    second[1] *= -0.5
    assert float(_agreement(layer, first, second, signs, Grouping(0))) < 0.9

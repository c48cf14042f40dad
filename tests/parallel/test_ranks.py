"""Several processes that train one model: the same steps on all, noise of each one's own, work divided."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import eigenoise as en
import processes
from arguments import accepted
from eigenoise import linalg
from eigenoise.optim import decomposition_schedule
from eigenoise.parallel import lockstep
from eigenoise.parallel.ranks import Ranks, divided, started_together

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # fork beside threads: here there is none that matters
]
METHODS = ["NoisyEKFAC", "NoisyKFAC", "NoisyAdam", "BayesByBackprop", "EKFAC", "KFAC"]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, 1))


def table(rows=64):
    made = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 2, 5, 5, generator=made, dtype=torch.float64)
    return x, x[:, :1, 2, 2] + 0.1 * torch.randn(rows, 1, generator=made, dtype=torch.float64)


def optimizer(model, method="NoisyEKFAC", **options):
    if method != "BayesByBackprop":
        often = {} if method == "NoisyAdam" else {"refresh_every": 3}
        ramp = accepted(getattr(en, method), noise_ramp=0, reuse_noise=False)
        options = {"stats_every": 2, "stats_fraction": 1.0, "fisher": "exact", **ramp, **often, **options}
    likelihood = en.GaussianLikelihood()
    return getattr(en, method)(model, num_data=64, likelihood=likelihood, lr=0.02, **options)


def steps(opt, model, count=7, ranks=1, rank=0, rows=64):
    x, y = (part.chunk(ranks)[rank] for part in table(rows))
    for _ in range(count):
        opt.zero_grad()
        for _ in range(opt.blocks_per_step):
            with opt.sampled_params():
                opt.likelihood.nll(model(x), y).backward()
        opt.step()


def means(opt):
    return {name: value.detach().clone() for name, value in opt.model.state_dict().items()}


def same_noise(monkeypatch):
    """All ranks draw what one process alone would draw."""
    monkeypatch.setattr(lockstep.Lockstep, "reseed", lambda self, step: self.generator.manual_seed(100 + step) and None)


def _trained(method, options, count=7):
    model = DistributedDataParallel(network())
    opt = optimizer(model, method, **options)
    steps(opt, model, count, dist.get_world_size(), dist.get_rank())
    return means(opt), opt.likelihood.state_dict(), opt.elbo_terms().evidence_per_example if opt.noisy else None


@pytest.mark.parametrize("method", METHODS)
def test_with_the_same_noise_ranks_step_as_one_process_does_with_all_their_data(monkeypatch, method):
    same_noise(monkeypatch)
    alone = optimizer(model := network(), method)
    steps(alone, model)
    for count in (2, 4):
        for found, likelihood, elbo in processes.run(count, _trained, method, {}):
            for name, value in means(alone).items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(likelihood["b"], alone.likelihood.b, rtol=1e-9, atol=0.0)
            if elbo is not None:
                torch.testing.assert_close(elbo, alone.elbo_terms().evidence_per_example, rtol=1e-9, atol=0.0)


def _noise_and_means(options):
    model = DistributedDataParallel(network())
    opt = optimizer(model, **options)
    with opt.sampled_params():
        drawn = {name: value.detach().clone() for name, value in opt.model.state_dict().items()}
    steps(opt, model, 5, dist.get_world_size(), dist.get_rank())
    return drawn, means(opt), opt.state_dict()["eigenoise"]["slots"]


@pytest.mark.parametrize("options", [{}, {"samples": 2, "antithetic": True}], ids=str)
def test_ranks_draw_noise_of_their_own_and_have_the_same_mean_bit_for_bit(options):
    found = processes.run(3, _noise_and_means, options)
    drawn, mean, kept = found[0]
    for others in found[1:]:
        assert not torch.allclose(others[0]["3.weight"], drawn["3.weight"])
        for name, value in mean.items():
            assert torch.equal(others[1][name], value)
        for slot, tensors in kept.items():
            for name, value in tensors.items():
                assert torch.equal(others[2][slot][name], value), (slot, name)


def _pull():
    model = DistributedDataParallel(network())
    opt = optimizer(model, momentum=0.0)
    x, y = (part.chunk(2)[dist.get_rank()] for part in table())
    with opt.sampled_params():
        own = [slot.sample.clone() for slot in opt.slots]
        opt.likelihood.nll(model(x), y).backward()
    opt._apply = lambda loss: None
    opt.step()
    return own, [each.clone() for each in opt.blocks.drawn]


def test_the_prior_pulls_at_the_mean_of_all_samples():
    (first, drawn), (second, also) = processes.run(2, _pull)
    for a, b, mean, other in zip(first, second, drawn, also, strict=True):
        torch.testing.assert_close(mean, (a + b) / 2)
        assert torch.equal(mean, other)


def test_work_is_divided_by_cost():
    assert divided([1, 9, 5, 4], 2) == [0, 0, 1, 1]
    owners = divided([8, 7, 6, 5, 4], 3)
    spent = [sum(c for c, o in zip([8, 7, 6, 5, 4], owners, strict=True) if o == r) for r in range(3)]
    assert sorted(spent) == [8, 11, 11]
    assert divided([], 2) == []


def test_several_ranks_take_several_turns_at_once(monkeypatch):
    monkeypatch.setattr(decomposition_schedule, "MAX_COST_PER_STEP", 1)
    costs = [4, 4, 4, 4, 4, 4]
    alone, three = (decomposition_schedule.turns(costs, 100, (10, 10), ranks) for ranks in (1, 3))
    assert [len(layers) for layers in alone.values()] == [0, 1, 1, 1, 1, 1, 1]
    assert [len(layers) for layers in three.values()] == [0, 3, 3]


def _decompositions(failing):
    done = []

    def counted(matrix, real=linalg.eigh_psd):
        done.append(matrix.shape[-1])
        return None if failing == dist.get_rank() else real(matrix)

    linalg.eigh_psd = counted
    model = DistributedDataParallel(network())
    opt = optimizer(model, refresh_every=1)
    if failing is None:
        steps(opt, model, 1, 2, dist.get_rank())
    else:
        with pytest.warns(RuntimeWarning, match="eigendecomposition failed for"):
            steps(opt, model, 1, 2, dist.get_rank())
    return done, {slot.name: slot.fisher.factors.q_out for slot in opt.slots}


def test_each_basis_is_found_by_one_rank_and_used_by_all():
    (first, bases), (second, others) = processes.run(2, _decompositions, None)
    assert sorted([*first, *second]) == sorted([19, 3, 28, 6, 7, 1])
    assert first
    assert second
    for name, basis in bases.items():
        assert torch.equal(basis, others[name])
        torch.testing.assert_close(basis @ basis.mT, torch.eye(len(basis)))


def test_a_basis_that_one_rank_cannot_find_stays_the_old_one_on_all():
    (_, bases), (_, others) = processes.run(2, _decompositions, 1)
    changed = [name for name, basis in bases.items() if not torch.equal(basis, torch.eye(len(basis)))]
    assert changed
    assert len(changed) < 3
    assert all(torch.equal(basis, others[name]) for name, basis in bases.items())


def _nan_on_one_rank(after, classes):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 3)))
    likelihood = en.CategoricalLikelihood() if classes else en.GaussianLikelihood()
    opt = en.NoisyEKFAC(model, num_data=64, likelihood=likelihood, stats_every=2, refresh_every=3)
    x = table()[0].chunk(2)[dist.get_rank()]
    y = torch.arange(len(x)) % 3 if classes else torch.zeros(len(x), 3)

    def step(x):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()
        opt.step()

    for _ in range(after):
        step(x)
    before = means(opt)
    with pytest.raises(FloatingPointError, match="the mean weights are unchanged"):
        step(x * (float("nan") if dist.get_rank() else 1.0))
    assert all(torch.equal(value, before[name]) for name, value in means(opt).items())
    step(x)
    return means(opt)


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("after", [1, 2], ids=["plain step", "step with statistics"])
def test_a_bad_batch_on_one_rank_stops_the_step_on_all(after, classes):
    first, second = processes.run(2, _nan_on_one_rank, after, classes)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def _calls_the_inner_model():
    model = DistributedDataParallel(network())
    with pytest.raises(RuntimeError, match="call the model that is wrapped in DistributedDataParallel"):
        steps(optimizer(model), model.module, 1, 2, dist.get_rank())


def _optimizer_of_the_inner_model():
    model = DistributedDataParallel(network())
    with pytest.raises(RuntimeError, match="give it the wrapped model"):
        steps(optimizer(model.module), model, 1, 2, dist.get_rank())
    opt = optimizer(alone := network())  # each rank may well have a model of its own
    steps(opt, alone, 2)
    assert not alone._forward_pre_hooks


def test_the_wrapped_model_is_to_be_used_and_given():
    processes.run(2, _calls_the_inner_model)
    processes.run(2, _optimizer_of_the_inner_model)


def _forward_before_training():
    model = DistributedDataParallel(network())
    opt = optimizer(model.module)
    with torch.no_grad():
        model.module(table()[0])
    copy.deepcopy(model.module)(table()[0])
    pickle.loads(pickle.dumps(model.module))(table()[0])
    with pytest.raises(RuntimeError, match="give it the wrapped model"):
        steps(opt, model, 1, 2, dist.get_rank())


def _group_of_one():
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = DistributedDataParallel(network(), process_group=groups[dist.get_rank()])
    opt = optimizer(model)
    assert opt.ranks is None
    steps(opt, model, 2)


def _refused():
    model = DistributedDataParallel(network(), static_graph=True)
    with pytest.raises(ValueError, match="leave static_graph out"):
        optimizer(model)
    with pytest.raises(ValueError, match="give the optimiser the DistributedDataParallel itself"):
        optimizer(nn.Sequential(DistributedDataParallel(network())))


@pytest.mark.parametrize("work", [_forward_before_training, _group_of_one, _refused])
def test_ways_to_wrap(work):
    processes.run(2, work)


def _only_one_loads(what):
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    steps(opt, model, 1, 2, dist.get_rank())
    if dist.get_rank() == 0:
        if what == "step":
            state = opt.state_dict()
            state["eigenoise"]["steps"] = 100
            opt.load_state_dict(state)
        else:
            model.module.load_state_dict(network(7).state_dict())
    if what == "weights":
        opt.load_state_dict(opt.state_dict())
    with pytest.raises(RuntimeError, match=r"at the same step|weights differ between processes"):
        steps(opt, model, 1, 2, dist.get_rank())


@pytest.mark.parametrize("what", ["step", "weights"])
def test_ranks_that_are_not_at_the_same_place_say_so(what):
    processes.run(2, _only_one_loads, what)


def _seeds_of_their_own():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(network())
    opts = [optimizer(model), optimizer(model, generator=torch.Generator().manual_seed(5 + dist.get_rank()))]
    return [(opt.lockstep.seed, opt.generator.initial_seed()) for opt in opts]


def test_noise_follows_from_the_first_ranks_seed():
    first, second = processes.run(2, _seeds_of_their_own)
    for (seed, noise), (same, other) in zip(first, second, strict=True):
        assert seed == same
        assert noise != other


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.a(x) + (self.b(x) if dist.get_rank() == 0 else 0.0)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5, dtype=torch.float32)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        return self.rest(self.first(x.float()).double())


def _trained_on_rows(make, options):
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), **options)
    opt = optimizer(model)
    x = torch.randn(12, 4)
    for _ in range(5):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(x), x[:, :1]).backward()
        opt.step()
    return means(opt)


@pytest.mark.parametrize(
    ("make", "options"),
    [(Branches, {"find_unused_parameters": True}), (TwoDtypes, {})],
    ids=["a layer that only one rank uses", "layers of two dtypes"],
)
def test_uncommon_networks(make, options):
    first, second = processes.run(2, _trained_on_rows, make, options)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def _closures(options):
    model = DistributedDataParallel(network(), **options)
    opt = optimizer(model, samples=2, antithetic=True)
    x, y = (part.chunk(2)[dist.get_rank()] for part in table())

    def closure():
        loss = opt.likelihood.nll(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    return means(opt)


def test_closures_with_several_samples_whatever_memory_gradients_are_in():
    plain, _ = processes.run(2, _closures, {})
    views, _ = processes.run(2, _closures, {"gradient_as_bucket_view": True})
    for name, value in plain.items():
        torch.testing.assert_close(views[name], value, rtol=1e-10, atol=1e-12)


def _sharded():
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"'0.weight', are divided between processes .*DistributedDataParallel"):
        optimizer(model)


def test_sharded_weights_are_refused_with_a_reason():
    processes.run(2, _sharded)


def _interrupted(stop, everyone_saves):
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    steps(opt, model, stop, 2, dist.get_rank())
    kept = [opt.model.state_dict(), opt.state_dict()]
    if not everyone_saves:
        dist.broadcast_object_list(kept, 0)  # what rank 0 would have written to a file
    torch.manual_seed(99)
    model = DistributedDataParallel(network(5))
    opt = optimizer(model)
    model.module.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    steps(opt, model, 7 - stop, 2, dist.get_rank())
    return means(opt)


@pytest.mark.parametrize("everyone_saves", [True, False])
def test_one_ranks_state_is_enough_to_go_on_bit_for_bit(everyone_saves):
    straight = processes.run(2, _interrupted, 0, True)
    for found in processes.run(2, _interrupted, 3, everyone_saves):
        assert all(torch.equal(value, straight[0][name]) for name, value in found.items())


def _accumulated():
    model = DistributedDataParallel(network())
    opt = optimizer(model, fisher="exact")
    x, y = (part.chunk(2)[dist.get_rank()] for part in table())
    for _ in range(4):
        opt.zero_grad()
        with opt.sampled_params():
            with model.no_sync():
                (opt.likelihood.nll(model(x[:16]), y[:16]) / 2).backward()
            (opt.likelihood.nll(model(x[16:]), y[16:]) / 2).backward()
        opt.step()
    return means(opt)


def test_micro_batches_on_several_ranks_are_one_batch(monkeypatch):
    same_noise(monkeypatch)
    alone = optimizer(model := network())
    steps(alone, model, 4)
    for found in processes.run(2, _accumulated):
        for name, value in means(alone).items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def _one_dies():
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    steps(opt, model, 2, 2, dist.get_rank())
    if dist.get_rank():
        os._exit(9)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        steps(opt, model, 3, 2, dist.get_rank())
    return time.monotonic() - began


def _one_stalls():
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    steps(opt, model, 2, 2, dist.get_rank())
    if dist.get_rank():
        time.sleep(8)
        return None
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        steps(opt, model, 3, 2, dist.get_rank())
    return time.monotonic() - began


def test_a_rank_that_dies_or_stalls_is_an_error_on_the_others():
    assert processes.run(2, _one_dies, may_die=True)[0] < 30
    assert processes.run(2, _one_stalls, seconds=3.0)[0] < 7


def _whole_predictive():
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    steps(opt, model, 3, 2, dist.get_rank())
    assert isinstance(opt.ranks, Ranks)
    if dist.get_rank() == 0:  # alone: nothing waits for the other
        return en.predict(opt.model, opt, table()[0], samples=4).mean, en.predict(
            model, opt, table()[0], samples=4
        ).mean
    return None


def test_one_rank_can_predict_alone():
    (inner, outer), nothing = processes.run(2, _whole_predictive)
    assert torch.equal(inner, outer)
    assert nothing is None


def test_the_example_runs_under_torchrun():
    example = Path(__file__).parents[2] / "examples" / "data_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--steps", "40"], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 processes, "), done.stdout
    assert float(done.stdout.split()[-2].rstrip("%")) > 70


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with started_together("cpu", 5.0) as ranks:
        assert ranks is None


def _in_a_group(work):
    """Call ``work`` as torchrun would have it called, in a group of its own."""
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    port = [0]
    if dist.get_rank() == 0:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = [found.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    os.environ["MASTER_PORT"] = str(port[0])
    dist.destroy_process_group()
    return work()


def _lost_in_a_group():
    def work():
        with started_together("cpu", 3.0) as ranks:
            if ranks.rank:
                os._exit(9)
            ranks.any(False)

    with pytest.raises(ConnectionError, match=r"another process is gone or did not answer for 3 s \(.+\)"):
        _in_a_group(work)
    return "told"


def _other_errors_in_a_group():
    def work():
        with started_together("cpu", 30.0) as ranks:
            assert ranks.any(ranks.rank == 1)
            assert not ranks.any(False)
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        _in_a_group(work)


def test_processes_that_torchrun_started_find_each_other_and_say_when_one_is_lost():
    assert processes.run(2, _lost_in_a_group, may_die=True) == ["told", None]
    processes.run(2, _other_errors_in_a_group)


def _at_steps_of_their_own():
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    opt.steps = 1 + dist.get_rank()
    try:
        steps(opt, model, 1, 3, dist.get_rank())
    except RuntimeError as error:
        return str(error)
    return "stepped"


def test_three_ranks_at_three_steps_all_say_so_the_middle_one_too():
    for k, said in enumerate(processes.run(3, _at_steps_of_their_own)):
        assert f"expected all processes at the same step, got {1 + k} in this one" in said


def _hyperparameters_of_their_own(name):
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    opt.param_groups[0][name] *= 1 + dist.get_rank()
    before = means(opt)
    with pytest.raises(RuntimeError, match=r"expected the same hyperparameters in all processes, such as lr"):
        steps(opt, model, 1, 2, dist.get_rank())
    assert all(torch.equal(before[name], value) for name, value in means(opt).items())


@pytest.mark.parametrize("name", ["lr", "num_data"])
def test_different_hyperparameters_are_refused_at_the_first_step(name):
    processes.run(2, _hyperparameters_of_their_own, name)


def _joined():
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    refused = pytest.raises(RuntimeError, match=r"uneven inputs with Join are not supported.*drop_last=True")
    with refused, model.join():
        steps(opt, model, 1, 2, dist.get_rank())


def test_join_is_refused():
    processes.run(2, _joined)


def _one_is_empty():
    model = DistributedDataParallel(network())
    opt = optimizer(model)
    x, y = table(8)
    if dist.get_rank() == 0:
        x, y = x[:0], y[:0]
    try:
        with opt.sampled_params():
            opt.likelihood.nll(model(x), y).backward()
        opt.step()
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_an_empty_batch_is_named_where_it_is():
    said = processes.run(2, _one_is_empty, seconds=10.0)
    assert "the batch is empty" in said[0]
    assert "in all processes if there are several" in said[0]

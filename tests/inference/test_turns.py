"""Threads that use one model: predictions never see, or leave behind, another thread's sample."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import eigenoise as en
from eigenoise.inference import turns


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, en.NoisyEKFAC(model, num_data=20, likelihood="classification", noise_ramp=0)


def step(model, opt):
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    opt.zero_grad()
    with opt.sampled_params():
        opt.likelihood.nll(model(x), y).backward()
    opt.step()


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


def in_thread(work):
    """What ``work`` returned or raised in a thread of its own."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found[0]


@pytest.mark.parametrize("what", ["optimizer", "posterior", "elbo", "the posterior itself"])
def test_within_a_block_another_thread_is_refused_and_the_mean_survives(monkeypatch, what):
    for module in ("predict", "elbo", "posterior"):
        monkeypatch.setattr(f"eigenoise.inference.{module}.PATIENCE", 0.05)
    for module in ("base", "evaluation"):
        monkeypatch.setattr(f"eigenoise.optim.{module}.PATIENCE", 0.05)
    model, opt = trained()
    step(model, opt)
    x, posterior, before = torch.randn(4, 3), opt.posterior, copies(model)
    calls = {
        "optimizer": lambda: opt.predict(x),
        "posterior": lambda: en.predict(model, posterior, x),
        "elbo": lambda: opt.elbo(x, torch.zeros(4, dtype=torch.long)),
        "the posterior itself": lambda: opt.posterior,
    }
    with opt.sampled_params():
        assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        error = in_thread(calls[what])
    assert isinstance(error, RuntimeError)
    assert "another thread has had sampled weights in this model" in str(error)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_training_goes_as_it_would_without_predictions_beside_it():
    def train(beside):
        model, opt = trained()
        x, done = torch.randn(4, 3), threading.Event()

        def predict():
            count = 0
            while not done.is_set() or not count:
                opt.predict(x, samples=2)
                count += 1
            return count

        result = []
        thread = threading.Thread(target=lambda: result.append(predict()))
        if beside:
            thread.start()
        for i in range(30):
            torch.manual_seed(i)
            step(model, opt)
        done.set()
        if beside:
            thread.join(60)
            assert result  # no prediction raised
        return copies(model)

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_turns_are_taken_in_order_and_again_by_their_owner():
    model, order = nn.Linear(1, 1), []
    threads = []
    with turns.exclusive(model), turns.exclusive(model):
        for i in range(3):

            def work(i=i):
                with turns.exclusive(model):
                    order.append(i)

            threads.append(threading.Thread(target=work))
            threads[-1].start()
            while len(turns._turns[model]._queue) <= i:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2]

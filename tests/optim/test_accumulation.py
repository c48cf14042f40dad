"""Gradient accumulation in four kinds of loops: a step from two halves of a batch equals the step from the batch."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import eigenoise as en

OPTIONS = {"num_data": 8, "likelihood": "classification", "lr": 0.1, "damping": 0.1, "fisher": "exact"}
TOL = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def data():
    torch.manual_seed(3)
    return torch.randn(8, 3), torch.randint(2, (8,))


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def build(method=en.EKFAC):
    """Without noise, as two halves would draw other weights than one batch does."""
    model = network()
    return model, method(model, stats_every=1, **OPTIONS)


@pytest.fixture
def expected(data):
    """The weights after two steps with the whole batch."""
    model, opt = build()
    for _ in range(2):
        opt.zero_grad()
        with opt.sampled_params():
            opt.likelihood.nll(model(data[0]), data[1]).backward()
        opt.step()
    return model.state_dict()


def halves(data):
    return [(data[0][:4], data[1][:4]), (data[0][4:], data[1][4:])]


def assert_same(model, expected):
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], **TOL)


def test_by_hand(data, expected):
    model, opt = build()
    for _ in range(2):
        opt.zero_grad()
        for x, y in halves(data):
            with opt.sampled_params():
                (opt.likelihood.nll(model(x), y) / 2).backward()
        opt.step()
    assert_same(model, expected)


def closure_of(opt, model, x, y, clears):
    def closure():
        loss = opt.likelihood.nll(model(x), y) / (1 if clears else 2)
        if clears:
            opt.zero_grad()
        loss.backward()
        return loss

    return closure


def test_the_last_part_may_be_a_closure(data, expected):
    model, opt = build()
    for _ in range(2):
        opt.zero_grad()
        first, last = halves(data)
        with opt.sampled_params():
            closure_of(opt, model, *first, clears=False)()
        opt.step(closure_of(opt, model, *last, clears=False))
    assert_same(model, expected)


def test_a_closure_that_clears_gradients_drops_what_was_before(data, expected):
    model, opt = build()
    for _ in range(2):
        with opt.sampled_params():
            opt.likelihood.nll(model(100 * data[0]), data[1]).backward()
        opt.step(closure_of(opt, model, *data, clears=True))
    assert_same(model, expected)


def test_gradients_from_outside_a_block_are_not_dropped_silently(data):
    model, opt = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, last = halves(data)
    opt.zero_grad()
    closure_of(opt, model, *first, clears=False)()
    with pytest.raises(RuntimeError, match=r"would drop gradients .* outside sampled_params\(\).*lightning_module"):
        opt.step(closure_of(opt, model, *last, clears=False))
    assert_same(model, before)
    for _ in range(2):  # what a step leaves behind is not that
        opt.zero_grad()
        opt.step(closure_of(opt, model, *last, clears=False))


def test_accelerate(data, expected):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, plain = build()
    opt = accelerator.prepare(plain)
    for _ in range(2):
        for x, y in halves(data):
            with accelerator.accumulate(model):
                with plain.sampled_params():
                    accelerator.backward(plain.likelihood.nll(model(x), y))
                opt.step()  # accelerate lets it through after the last part only
                opt.zero_grad()
    assert_same(model, expected)


@pytest.mark.filterwarnings("ignore")
def test_lightning(data, expected):
    lightning = pytest.importorskip("lightning")
    from lightning_module import SampledMicroBatches  # of examples/

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.opt = build()

        def training_step(self, batch, _):
            return self.opt.likelihood.nll(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return self.opt

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "accumulate_grad_batches": 2, **quiet}

    module = Module()
    lightning.Trainer(callbacks=[SampledMicroBatches()], **options).fit(module, loader)
    assert module.opt.steps == 2
    assert_same(module.model, expected)

    with pytest.raises(RuntimeError, match="would drop gradients"):
        lightning.Trainer(**options).fit(Module(), loader)


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer(data, expected, tmp_path):
    transformers = pytest.importorskip("transformers")

    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, labels=None):
            return {"logits": self.model(x)}

    class Trainer(transformers.Trainer):
        """Trains within blocks of sampled weights."""

        def training_step(self, *args, **kwargs):
            with bayesian.sampled_params():
                return super().training_step(*args, **kwargs)

        def compute_loss(self, model, inputs, **kwargs):
            return bayesian.likelihood.nll(model(inputs["x"])["logits"], inputs["labels"])

    torch.manual_seed(2)
    wrapped = Wrapped(network())
    bayesian = en.EKFAC(wrapped, stats_every=1, **OPTIONS)
    schedule = torch.optim.lr_scheduler.ConstantLR(bayesian, factor=1.0)
    rows = [{"x": x, "labels": y} for x, y in zip(*data, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    trainer = Trainer(model=wrapped, args=arguments, train_dataset=rows, optimizers=(bayesian, schedule))
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    assert bayesian.steps == 2
    assert_same(wrapped.model, expected)

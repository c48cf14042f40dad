"""Lightning: return the optimiser from configure_optimizers; gradient accumulation needs one callback.

Lightning hands the training step to ``optimizer.step`` as a closure, and a closure is run under sampled weights. With
``accumulate_grad_batches`` only the last part of a batch comes that way; the callback samples weights for the others.

pip install lightning; python examples/lightning_module.py [--steps 600] [--accumulate 2]
"""

import argparse
import contextlib
import logging
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import eigenoise as en


class Digits(lightning.LightningModule):
    """A network for 8×8 images of digits."""

    def __init__(self, num_data: int):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
        self.likelihood = en.CategoricalLikelihood()
        self.num_data = num_data

    def training_step(self, batch, _):
        x, y = batch
        return self.likelihood.nll(self.model(x), y)

    def configure_optimizers(self):
        return en.NoisyEKFAC(self.model, num_data=self.num_data, likelihood=self.likelihood)

    def predict_step(self, batch, _):
        return en.predict(self.model, self.optimizers().optimizer, batch[0]).probs


class SampledMicroBatches(lightning.Callback):
    """Runs the parts of an accumulated batch under sampled weights, as ``step(closure)`` does with the last one."""

    def __init__(self):
        self.block = contextlib.ExitStack()

    def on_train_batch_start(self, trainer, module, batch, i):
        steps_now = (i + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if not steps_now:
            self.block.enter_context(trainer.optimizers[0].sampled_params())

    def on_train_batch_end(self, trainer, module, outputs, batch, i):
        self.block.close()

    def on_exception(self, trainer, module, exception):
        self.block.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    train, test = random_split(digits, [1400, len(digits) - 1400])
    module = Digits(len(train))
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        callbacks=[SampledMicroBatches()],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True))

    images = torch.stack([image for image, _ in test])
    labels = torch.stack([label for _, label in test])
    predicted = en.predict(module.model, module.optimizers().optimizer, images, samples=30)
    right = (predicted.probs.argmax(-1) == labels).float().mean()
    print(f"right {right:.1%}, log-likelihood {predicted.log_prob(labels).mean():.3f}")


if __name__ == "__main__":
    main()

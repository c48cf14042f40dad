"""``eigenoise cifar10``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eigenoise.cli.base import DataCache, Quiet, TensorBoard, app, board_for, console, reported, rich_table, say

if TYPE_CHECKING:
    from eigenoise.reporting.progress import Watch
    from eigenoise.reporting.tensorboard import Board
    from eigenoise.studies.classification.study import Run
    from eigenoise.studies.classification.training import Training

HISTOGRAMS_EVERY = 100  # steps


@app.command()
def cifar10(
    method: Annotated[
        str, typer.Option(help="One or more of sgd, kfac, ekfac, bbb, noisy-adam, noisy-kfac, noisy-ekfac.")
    ] = "noisy-ekfac",
    bn: Annotated[bool, typer.Option("--bn/--no-bn", help="With batch norm.")] = True,
    aug: Annotated[bool, typer.Option("--aug/--no-aug", help="With shifted and mirrored images.")] = True,
    epochs: Annotated[float | None, typer.Option(min=0.001, help="Number of epochs; by default 10.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps, instead of epochs.")] = None,
    train_size: Annotated[int, typer.Option(min=2, help="Number of training images, a fixed subset.")] = 50_000,
    batch_size: Annotated[int, typer.Option(min=2, help="Images per step and process.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Weight samples averaged in the test.")] = 10,
    width: Annotated[float, typer.Option(help="Factor on the channels of VGG16.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of weights, noise, order and augmentation.")] = 0,
    kl_weight: Annotated[float | None, typer.Option(help="λ, instead of the recipe's.")] = None,
    prior_var: Annotated[float | None, typer.Option(help="η, instead of the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, instead of the recipe's.")] = None,
    validate: Annotated[bool, typer.Option(help="Test on held-out training images, to choose settings.")] = False,
    corrupted: Annotated[
        int, typer.Option(min=0, help="Number of test images to corrupt in 15 ways and test as well.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("results"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped run.")] = False,
    folder: DataCache = None,
    device: Annotated[str, typer.Option(help="Device to train on, such as cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads.")] = 1,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that processes wait for each other.")] = 1800.0,
    tensorboard: TensorBoard = None,
    quiet: Quiet = False,
) -> None:
    """Classify CIFAR-10 with VGG16, beside the paper's Table 2: tables here and in Markdown, results as JSON, pictures.

    Example: eigenoise cifar10 --method noisy-ekfac,sgd --bn --aug --epochs 5 --train-size 10000 --out results

    In two processes: torchrun --nproc-per-node 2 -m eigenoise cifar10 --epochs 5 --out results
    """
    import torch

    from eigenoise import checks, storage
    from eigenoise.parallel.ranks import started_together
    from eigenoise.reporting.progress import watching
    from eigenoise.studies.classification import report, study
    from eigenoise.studies.classification.training import METHODS
    from eigenoise.studies.recipes import Setting

    torch.set_num_threads(threads)
    given = {"kl_weight": kl_weight, "prior_var": prior_var, "lr": lr}
    options = {name: value for name, value in given.items() if value is not None}
    hint = "the same command with --resume continues from here"
    with reported("cifar10", hint), started_together(device, timeout) as ranks:
        first, processes = ranks is None or ranks.rank == 0, 1 if ranks is None else ranks.size
        quiet = quiet or not first
        terminal = console(quiet)
        if steps is not None and epochs is not None:
            raise ValueError("expected --steps or --epochs, got both")
        if epochs is not None:
            checks.number("--epochs", epochs)
        count = steps or max(1, round((10.0 if epochs is None else epochs) * train_size / (batch_size * processes)))
        runs = [
            study.Run(
                checks.choice("--method", word.strip(), METHODS),
                Setting(aug, bn),
                count,
                train_size=train_size,
                batch_size=batch_size,
                samples=samples,
                seed=seed,
                width=width,
                validate=validate,
                corrupted=corrupted,
                options=options,
            )
            for word in method.split(",")
        ]
        storage.folder(out)
        new = [{"settings": run.settings(), "processes": processes} for run in runs]
        report.check_comparable([*report.collect(out), *new], str(out))
        for run in runs:  # report what is wrong with old results of any run before the first begins
            study.check(run, out, resume, processes)
        with watching(not quiet) as watch:
            for run in runs:
                with board_for(tensorboard if first else None, run.name) as board:
                    display = _Display(run, watch, board)
                    study.run_cifar10(
                        run,
                        out,
                        folder,
                        device=device,
                        resume=resume,
                        ranks=ranks,
                        on_step=display.on_step,
                        on_pass=display.on_pass,
                    )
                    display.task.end()
        if not first:
            return
        for grid in report.grids(report.collect(out)):
            terminal.print(rich_table(grid))
        for path in report.write(out):
            say(terminal, f"written: {path}")


class _Display:
    """Shows a run in the terminal and on TensorBoard."""

    def __init__(self, run: Run, watch: Watch, board: Board | None):
        self.run, self.watch, self.board = run, watch, board
        self.task = watch.task(run.name, run.steps)
        self.began: tuple[float, int] | None = None  # when, and after which step
        self.passes, self.noisy = 0, True

    def on_step(self, training: Training) -> None:
        done, (loss, accuracy) = len(training.curve), training.curve[-1]
        self.noisy = training.optimizer.noisy
        now = time.monotonic()
        self.began = self.began or (now, done)
        rate = (done - self.began[1]) * training.images_per_step / max(1e-9, now - self.began[0])
        last = training.curve[-20:]
        means = [sum(column) / len(last) for column in zip(*last, strict=True)]
        self.task.to(done, f"loss {means[0]:.3f}  right {means[1]:.1%}  {rate:.0f} images/s")
        if self.board is not None:
            self.board.scalars(done, loss=loss, right=accuracy)
            if done % HISTOGRAMS_EVERY == 0:
                self.board.histograms(done, training.optimizer)

    def on_pass(self) -> None:
        if self.passes == 0:
            self.task.end()
            self.task = self.watch.task(f"{self.run.name}, test", 1 + self.run.samples if self.noisy else 1)
        self.passes += 1
        self.task.to(self.passes)

"""``eigenoise fit`` and ``eigenoise predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eigenoise.cli.base import Quiet, app, check_out_file, console, reported, rich_table, say

MAX_WIDTH = 10_000  # units of a hidden layer


def _sizes(hidden: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in hidden.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= size <= MAX_WIDTH for size in sizes):
        raise ValueError(f"--hidden: expected numbers from 1 to {MAX_WIDTH:,} such as 50 or 100,50, got {hidden!r}")
    return sizes


@app.command()
def fit(
    table: Annotated[Path, typer.Argument(help="A CSV or Parquet file.")],
    target: Annotated[str, typer.Option(help="The column to predict.")],
    out: Annotated[Path, typer.Option(help="File of the model.")],
    task: Annotated[
        str | None, typer.Option(help="regression or classification; by default inferred from the target.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out; repeat for more.")] = None,
    method: Annotated[str, typer.Option(help="noisy-ekfac, noisy-kfac, noisy-adam or bbb.")] = "noisy-ekfac",
    members: Annotated[int, typer.Option(min=1, help="Number of networks in the ensemble.")] = 5,
    hidden: Annotated[str, typer.Option(help="Units of the hidden layers, such as 50 or 100,50.")] = "50",
    held_out: Annotated[float, typer.Option(help="Fraction of the rows to test on.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the held-out rows and of the fit.")] = 0,
    encoding: Annotated[str, typer.Option(help="Encoding of a CSV file.")] = "utf-8",
    quiet: Quiet = False,
) -> None:
    """Learn to predict a column of a table, and say how well, beside scikit-learn's models.

    Example: eigenoise fit houses.csv --target price --out houses.model
    """
    from eigenoise.tabular.learning import learn
    from eigenoise.tabular.reading import read_table

    terminal = console(quiet)
    with reported("fit", "nothing was written"):
        sizes = _sizes(hidden)
        frame = read_table(table, encoding)
        check_out_file(out, table)
        learned = learn(
            frame,
            target,
            task=task,
            drop=drop or (),
            held_out=held_out,
            seed=seed,
            method=method,
            members=members,
            hidden_layer_sizes=sizes,
            verbose=not quiet,
        )
        learned.save(out)
    for name, why in learned.schema.left_out:
        say(terminal, f"left out: {name!r} {why}")
    kinds = [column.kind for column in learned.schema.columns]
    counted = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
    columns = f"{len(kinds)} columns ({counted})"
    say(terminal, f"{learned.schema.task} of {target!r} by {columns}, {learned.rows[0]:,} rows")
    terminal.print(rich_table(learned.grid()))
    say(terminal, f"written: {out}; next: eigenoise predict {out} NEW.csv --out PREDICTED.csv")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model that fit wrote.")],
    table: Annotated[Path, typer.Argument(help="A CSV or Parquet file with the same columns.")],
    out: Annotated[Path, typer.Option(help="File of the table with predictions.")],
    interval: Annotated[float, typer.Option(help="Probability of the predictive intervals.")] = 0.9,
    encoding: Annotated[str, typer.Option(help="Encoding of a CSV file.")] = "utf-8",
    quiet: Quiet = False,
) -> None:
    """Add predictions to a table: a number and its interval, or a class and all probabilities.

    Example: eigenoise predict houses.model new.csv --interval 0.9 --out predicted.csv
    """
    from eigenoise import checks
    from eigenoise.tabular.learning import Learned
    from eigenoise.tabular.learning import predict as add_predictions
    from eigenoise.tabular.reading import read_table, write_table

    with reported("predict", "nothing was written"):
        checks.number("--interval", interval, open_low=True, high=0.9999)
        check_out_file(out, table, model)
        learned = Learned.load(model)
        texts = [column.name for column in learned.schema.columns if column.kind == "category"]
        frame = read_table(table, encoding, texts)
        predicted = add_predictions(learned, frame, interval)
        write_table(predicted, out, [name for name in predicted.columns if name not in frame.columns])
    say(console(quiet), f"written: {out}, {len(predicted):,} rows")

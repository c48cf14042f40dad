"""Do networks that people have learn from scratch at the defaults, and in how many of Adam's steps?

    python benchmarks/from_scratch.py [--network BERT ViT ...] [--method noisy-ekfac ...] [--steps 400] [--show]

Seven small networks, four classes, 2,000 made-up examples, batches of 32, one seed. For each method the mean training
loss of every twenty steps is kept, under noise where the method has noise, and the table has the steps that it takes to
losses of 0.7 and 0.1. Adam has the best of three step sizes by its own last loss; ours have their defaults. Results go
to benchmarks/results/from_scratch.json as they come.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import eigenoise as en
from eigenoise import models, storage
from eigenoise.studies.runner import environment

OUT = Path(__file__).parent / "results" / "from_scratch.json"
ROWS, CLASSES, BATCH, LENGTH, WORDS, EVERY = 2000, 4, 32, 16, 32, 20
ADAM_RATES = (3e-4, 1e-3, 3e-3)


def sequences(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens ``(b, t)``; the class is that of the token after the only 0."""
    x = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    place = torch.randint(LENGTH - 1, (ROWS,), generator=generator)
    x[torch.arange(ROWS), place] = 0
    return x, x[torch.arange(ROWS), place + 1] % CLASSES


def counts(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens ``(b, t)``; the class is the most frequent of four marked words."""
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    x = torch.randint(CLASSES, WORDS, (ROWS, LENGTH), generator=generator)
    for i in range(3):  # three marks of the class, one of any
        x[:, 4 * i] = y
    x[:, 13] = torch.randint(CLASSES, (ROWS,), generator=generator)
    order = torch.rand(ROWS, LENGTH, generator=generator).argsort(1)
    return x.gather(1, order), y


def pictures(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy gratings ``(b, 3, 16, 16)`` in one of four directions, anywhere."""
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    angle = y * torch.pi / CLASSES
    phase = 2 * torch.pi * torch.rand(ROWS, 1, 1, generator=generator)
    grid = torch.arange(16.0)
    waves = angle.cos()[:, None, None] * grid[:, None] + angle.sin()[:, None, None] * grid
    x = torch.sin(waves + phase).unsqueeze(1) + torch.randn(ROWS, 3, 16, 16, generator=generator)
    return x, y


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs ``(b, 20)`` labelled by a random network."""
    x = torch.randn(ROWS, 20, generator=generator)
    first, second = torch.randn(20, 16, generator=generator), torch.randn(16, CLASSES, generator=generator)
    return x, (torch.tanh(x @ first / 3) @ second).argmax(1)


class Logits(nn.Module):
    """A network from Hugging Face, whose output is its logits."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(b, 4)``."""
        return self.network(x).logits


class LastState(nn.Module):
    """Embeddings, an LSTM and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(WORDS, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(b, 4)``."""
        return self.head(self.lstm(self.words(x))[0][:, -1])


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Logits(BertForSequenceClassification(config))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, num_labels=CLASSES, pad_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    config.pad_token_id = WORDS - 1
    return Logits(GPT2ForSequenceClassification(config))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        image_size=16, patch_size=2, hidden_sizes=[32, 64], depths=[2, 2], num_stages=2, num_labels=CLASSES
    )
    return Logits(ConvNextForImageClassification(config))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, Tensor]]]] = {
    "deep MLP": (lambda: models.MLP(20, [64] * 5, CLASSES), rows),
    "LSTM": (LastState, counts),
    "BERT": (bert, counts),
    "GPT-2": (gpt2, counts),
    "ViT": (vit, pictures),
    "ConvNeXt": (convnext, pictures),
    "encoder": (lambda: nn.Sequential(Tokens(), models.TransformerEncoder(32, 2, 2, CLASSES)), sequences),
}


class Tokens(nn.Module):
    """Embeddings of tokens and of their places."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(b, t, width)``."""
        return self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))


METHODS = {
    "noisy-ekfac": en.NoisyEKFAC,
    "noisy-kfac": en.NoisyKFAC,
    "noisy-adam": en.NoisyAdam,
    "ekfac": en.EKFAC,
}


def curve(network: str, method: str, steps: int, seed: int, **options: float) -> list[float]:
    """Mean training losses of every twenty steps."""
    make, data = NETWORKS[network]
    x, y = data(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    model = make()
    likelihood = en.CategoricalLikelihood()
    if method == "adam":
        adam = torch.optim.Adam(model.parameters(), **options)
    else:
        opt = METHODS[method](model, num_data=ROWS, likelihood=likelihood, **options)
    order = torch.Generator().manual_seed(seed)
    batches: list[Tensor] = []
    losses = []
    for _ in range(steps):
        batches = batches or list(torch.randperm(ROWS, generator=order).split(BATCH)[:-1])
        some = batches.pop()
        if method == "adam":
            adam.zero_grad()
            loss = functional.cross_entropy(model(x[some]), y[some])
            loss.backward()
            adam.step()
        else:
            with opt.sampled_params():
                opt.zero_grad()
                loss = likelihood.nll(model(x[some]), y[some])
                loss.backward()
            opt.step()
        losses.append(float(loss.detach()))
    return [sum(losses[i : i + EVERY]) / EVERY for i in range(0, steps, EVERY)]


def steps_to(losses: list[float], wanted: float) -> int | None:
    """Steps until the loss of a window is first as low as ``wanted``."""
    return next((EVERY * (i + 1) for i, loss in enumerate(losses) if loss <= wanted), None)


def table(results: dict) -> str:
    """In Markdown."""
    methods = ["adam", *METHODS]
    lines = [f"| steps to a loss of 0.7, 0.1; last loss | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for network in NETWORKS:
        runs = [results["runs"].get(f"{network}/{method}") for method in methods]
        lines.append(f"| {network} | {' | '.join('' if run is None else _cell(run) for run in runs)} |")
    return "\n".join(lines)


def _cell(run: list[float]) -> str:
    reached = ["–" if steps is None else str(steps) for steps in (steps_to(run, 0.7), steps_to(run, 0.1))]
    return f"{', '.join(reached)}; {run[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--method", nargs="+", choices=["adam", *METHODS], default=["adam", *METHODS])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(OUT.read_text()) if OUT.exists() else {"runs": {}}
    for network in [] if args.show else args.network:
        for method in args.method:
            if method == "adam":
                runs = [curve(network, method, args.steps, args.seed, lr=rate) for rate in ADAM_RATES]
                losses = min(runs, key=lambda run: run[-1])
            else:
                losses = curve(network, method, args.steps, args.seed)
            results["runs"][f"{network}/{method}"] = [round(loss, 4) for loss in losses]
            print(f"{network:10} {method:12}", " ".join(f"{loss:.2f}" for loss in losses), flush=True)
            storage.write_json(OUT, {**results, "environment": environment()})
    print(table(results))


if __name__ == "__main__":
    main()

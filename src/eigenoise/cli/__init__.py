"""The command line: ``eigenoise fit | predict | report | demo | uci | cifar10 | arena | bench | data``."""

from eigenoise.cli import arena, bench, cifar10, data, demo, report, tables, uci  # each adds its commands
from eigenoise.cli.base import app

__all__ = ["app", "arena", "bench", "cifar10", "data", "demo", "report", "tables", "uci"]

"""The command line: ``eigenoise fit | predict | report | demo | uci | cifar10 | bench | data``."""

from eigenoise.cli import bench, cifar10, data, demo, report, tables, uci  # each adds its commands
from eigenoise.cli.base import app

__all__ = ["app", "bench", "cifar10", "data", "demo", "report", "tables", "uci"]

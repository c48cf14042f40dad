"""The command line: ``eigenoise fit | predict | demo | uci | cifar10 | bench | data``."""

from eigenoise.cli import bench, cifar10, data, demo, tables, uci  # each adds its commands
from eigenoise.cli.base import app

__all__ = ["app", "bench", "cifar10", "data", "demo", "tables", "uci"]

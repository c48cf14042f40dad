"""The command line: ``eigenoise demo | uci | cifar10 | bench | data``."""

from eigenoise.cli import bench, cifar10, data, demo, uci  # each adds its command, in the order of --help below
from eigenoise.cli.base import app

__all__ = ["app", "bench", "cifar10", "data", "demo", "uci"]

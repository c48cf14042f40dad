"""``python -m eigenoise`` is the command line."""

from eigenoise.cli import app

app()

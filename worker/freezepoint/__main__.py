"""``python -m freezepoint`` is the command."""

from freezepoint.cli import main

main()

"""The command line: thin commands over the library, one module for each group of them.

This module imports next to nothing, so that Ctrl-C while the rest is imported ends the command without a word."""

from __future__ import annotations

import sys

from freezepoint.cli.start import INTERRUPTED, claim_process, loading


def main() -> None:
    """Entry point: every error is one line on stderr and a non-zero exit code."""
    claim_process()
    try:
        with loading():
            from freezepoint.cli.commands import run_command
        code = run_command()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)

"""``schema``: the contract's documents, for registries, generators and other languages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freezepoint.cli.common import note, write_line
from freezepoint.wording import counted
from freezepoint_schemas.generate import export as write_documents


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(
        help="The contract's JSON Schemas and AsyncAPI document.",
        epilog="Example: freezepoint schema export contract",
        no_args_is_help=True,
    )
    group.command(epilog="Example: freezepoint schema export contract")(export)
    app.add_typer(group, name="schema")


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to write; made where it is missing.")
    ] = Path("freezepoint-schemas"),
) -> None:
    """Write the JSON Schemas (json/v1/) and the AsyncAPI document (asyncapi.json); prints each path."""
    paths = write_documents(folder)
    for path in paths:
        write_line(str(path).encode("utf-8", "surrogateescape"))
    note(f"{counted(len(paths), 'document')} written to {folder}")

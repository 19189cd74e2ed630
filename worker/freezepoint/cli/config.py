"""``config``: the settings in effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import orjson
import typer
from pydantic import BaseModel, SecretStr

from freezepoint.cli.common import Broker, TopicPrefix, load_settings, write_line

HIDDEN = "(set, hidden)"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(epilog="Example: freezepoint config --json")(config)


def config(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of TOML.")] = False,
    broker: Broker = None,
    topic_prefix: TopicPrefix = None,
) -> None:
    """Print the settings in effect (options, environment, FREEZEPOINT_CONFIG file), secrets hidden."""
    settings = _shown(load_settings(broker, topic_prefix))
    if as_json:
        write_line(orjson.dumps(settings, option=orjson.OPT_INDENT_2))
    else:
        write_line("\n".join(_toml(settings)).encode())


def _shown(model: BaseModel) -> dict[str, Any]:
    """The settings as JSON values, with :data:`HIDDEN` for a secret that is set."""
    values = model.model_dump(mode="json")
    for name in values:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            values[name] = _shown(value)
        elif isinstance(value, SecretStr):
            values[name] = HIDDEN if value.get_secret_value() else ""
    return values


def _toml(settings: dict[str, Any]) -> Iterator[str]:
    """The file that ``FREEZEPOINT_CONFIG`` could name. What is not set stands as a comment, since TOML knows no null, and a secret
    that is set as well: no value of the file is taken for it."""
    sections = {name: value for name, value in settings.items() if isinstance(value, dict)}
    yield from _pairs({name: value for name, value in settings.items() if name not in sections})
    for name, section in sections.items():
        yield f"\n[{name}]"
        yield from _pairs(section)


def _pairs(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():  # a JSON string, number or boolean is a TOML one
        if value is None:
            yield f"# {name} ="
        elif value == HIDDEN:
            yield f"# {name} = {HIDDEN}"
        else:
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"

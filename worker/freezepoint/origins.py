"""Where settings come from: the variables and the file's keys are checked by name, so that a misspelled one is never ignored,
and a value that cannot be used is told by the name it was given under."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel, ValidationError

from freezepoint.addresses import can_be_written
from freezepoint.errors import ConfigurationError

PREFIX: Final = "FREEZEPOINT_"
CONFIG: Final = "FREEZEPOINT_CONFIG"
OTHER_VARIABLES: Final = {
    CONFIG: "the settings file",
    "FREEZEPOINT_LOG_LEVEL": "what `freezepoint run` logs",
    "FREEZEPOINT_KAFKA_JARS": "where the tests keep a broker's jars",
    "FREEZEPOINT_REQUIRE_BROKER": "whether tests fail that find no broker",
}
"""Variables that are no settings, and what they are for."""

_SERVICE = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def check_environment(settings: type[BaseModel]) -> None:
    """:raises ConfigurationError: a variable of ours is none that anybody reads or no text, or a whole section is no JSON
    object."""
    known = {_variable(name) for name in _names(settings)} | OTHER_VARIABLES.keys()
    for name, value in os.environ.items():
        variable = name.upper()
        if not variable.startswith(PREFIX) or _tells_of_a_service(variable, value):
            continue
        if variable not in known:
            raise ConfigurationError(_unknown(name, variable, known))
        if not can_be_written(value, "utf-8"):  # bytes that are no UTF-8 stand in it as half a character each
            raise ConfigurationError(f"{name} is not UTF-8")
        section = _sections(settings).get(variable.removeprefix(PREFIX).lower())
        if section is not None:
            _check_keys(name, _json_object(name, value), section, f"{variable.removeprefix(PREFIX).lower()}.")


def _tells_of_a_service(variable: str, value: str) -> bool:
    """Kubernetes gives every pod variables named after the services beside it, such as one called ``freezepoint``."""
    return bool(
        _SERVICE.search(variable) or (variable.endswith("_PORT") and _SERVICE_URL.match(value) is not None)
    )


def _json_object(name: str, value: str) -> dict[str, Any]:
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(
            f"{name} is no JSON: {error.msg}; or set its parts one by one: {name}__…"
        ) from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{name} is no JSON object; or set its parts one by one: {name}__…")
    return found


def read_file(path: str, settings: type[BaseModel]) -> dict[str, Any]:
    """What the settings file says. :raises ConfigurationError: it cannot be read, or has a key that is no setting."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        found = tomllib.loads(text)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ConfigurationError(f"{CONFIG} names {path}, which is no file") from None
    except OSError as error:
        raise ConfigurationError(f"{CONFIG} names {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}: line {line} is not UTF-8; write the file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    _check_keys(path, found, settings, "")
    return found


def _check_keys(where: str, given: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
    known = {f"{prefix}{name}" for name in model.model_fields}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise ConfigurationError(f"{where}: {_unknown(name, name, known)}")
        section = _sections(model).get(key)
        if section is not None and isinstance(value, dict):
            _check_keys(where, value, section, f"{name}.")


def _unknown(name: str, asked: str, known: Iterable[str]) -> str:
    """What all names begin with would make all of them alike."""
    by_rest = {other.removeprefix(PREFIX): other for other in sorted(known)}
    nearest = difflib.get_close_matches(asked.removeprefix(PREFIX), by_rest, 1)
    hint = (
        f"did you mean {by_rest[nearest[0]]}?"
        if nearest
        else "freezepoint config prints every setting's name"
    )
    return f"{name} is no setting; {hint}"


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return {
        name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)
    }


def _names(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every setting and section, as a path of names."""
    for name in model.model_fields:
        yield (name,)
    for name, section in _sections(model).items():
        yield from ((name, *path) for path in _names(section))


def _variable(path: Iterable[str | int]) -> str:
    return PREFIX + "__".join(str(part) for part in path).upper()


def first_problem(error: ValidationError, given: Mapping[str, Any], settings: type[BaseModel]) -> str:
    """What is wrong, after the name that the value was given under: argument, variable, or file and key."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    return f"{_given_as(problem['loc'], given, settings)}: {message}"


def _given_as(location: tuple[str | int, ...], given: Mapping[str, Any], settings: type[BaseModel]) -> str:
    name = ".".join(str(part) for part in location)
    if _holds(given, location):
        return name
    variables = {variable.upper() for variable in os.environ}
    for length in range(len(location), 0, -1):
        if (variable := _variable(location[:length])) in variables:
            return variable if length == len(location) else f"{variable}: {name}"
    path = os.environ.get(CONFIG)
    if path and _holds(read_file(path, settings), location):
        return f"{path}: {name}"
    return name


def _holds(given: Any, location: tuple[str | int, ...]) -> bool:
    for part in location:
        if not isinstance(given, Mapping) or part not in given:
            return False
        given = given[part]
    return True

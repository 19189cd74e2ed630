"""Whether everything that one JSON Schema allows is allowed by another: the rules of the version policy.

Knows the keywords that the contract's schemas use and raises on any other, so that none is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

SAID_TO_PEOPLE = {"$schema", "$defs", "title", "description", "examples", "default", "contentEncoding"}
CHECKED = {
    "$ref", "type", "enum", "const", "anyOf", "required", "properties", "additionalProperties", "items", "prefixItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "pattern",
}  # fmt: skip
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
WIDER = {"integer": {"integer", "number"}}


@dataclass(frozen=True)
class _Side:
    """A schema with the document it refers into."""

    schema: Schema
    root: Schema

    def resolved(self) -> _Side:
        side = self
        while "$ref" in side.schema:
            found: Any = side.root
            for step in side.schema["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            side = _Side(found, side.root)
        unknown = side.schema.keys() - SAID_TO_PEOPLE - CHECKED
        if unknown:
            raise NotImplementedError(f"no rule for {sorted(unknown)}")
        return side

    def at(self, keyword: str, *path: Any) -> _Side:
        found = self.schema[keyword]
        for step in path:
            found = found[step]
        return _Side(found if isinstance(found, Mapping) else {}, self.root)

    def get(self, keyword: str) -> Any:
        return self.schema.get(keyword)


def problems(given: Schema, taken: Schema) -> list[str]:
    """Why something that ``given`` allows might be refused, or lost, by a reader of ``taken``; empty where nothing is."""
    return list(_problems(_Side(given, given), _Side(taken, taken), ""))


def _problems(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    given, taken = given.resolved(), taken.resolved()
    if "anyOf" in given.schema or "anyOf" in taken.schema:
        yield from _alternatives(given, taken, where)
        return
    for rule in (_types, _values, _bounds, _objects, _arrays):
        yield from rule(given, taken, where)


def _alternatives(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    choices = [taken.at("anyOf", index) for index in range(len(taken.get("anyOf") or ()))] or [taken]
    offers = [given.at("anyOf", index) for index in range(len(given.get("anyOf") or ()))] or [given]
    for offer in offers:
        found = [list(_problems(offer, choice, where)) for choice in choices]
        if all(found):
            yield min(found, key=len)[0]


def _types(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    kind, wanted = given.get("type"), taken.get("type")
    if wanted is not None and wanted not in WIDER.get(kind, {kind}):
        yield f"{where or '/'}: {kind or 'anything'} is no {wanted}"


def _values(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    allowed = _listed(taken)
    if allowed is None:
        return
    listed = _listed(given)
    if listed is None:
        yield f"{where or '/'}: any value, but only {allowed} are known"
    for value in listed or ():
        if value not in allowed:
            yield f"{where or '/'}: {value!r} is not known"


def _listed(side: _Side) -> list[Any] | None:
    if "const" in side.schema:
        return [side.get("const")]
    listed: list[Any] | None = side.get("enum")
    return listed


def _bounds(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    checks: tuple[tuple[tuple[str, ...], Callable[[Any, Any], bool]], ...] = (
        (LOWER, lambda has, needs: has >= needs),
        (UPPER, lambda has, needs: has <= needs),
        (("pattern",), lambda has, needs: has == needs),
    )
    for keywords, holds in checks:
        for keyword in keywords:
            needs, has = taken.get(keyword), given.get(keyword)
            if needs is not None and (has is None or not holds(has, needs)):
                yield f"{where or '/'}: {keyword} is {has}, needs {needs}"


def _objects(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    properties, known = given.get("properties") or {}, taken.get("properties") or {}
    for name in set(taken.get("required") or ()) - set(given.get("required") or ()):
        yield f"{where}/{name}: not always there, and required"
    for name in properties:
        if name in known:
            yield from _problems(
                given.at("properties", name), taken.at("properties", name), f"{where}/{name}"
            )
    if isinstance(taken.get("additionalProperties"), Mapping):
        if not isinstance(given.get("additionalProperties"), Mapping):
            yield f"{where or '/'}: values of any kind"
        else:
            yield from _problems(
                given.at("additionalProperties"), taken.at("additionalProperties"), f"{where}/*"
            )
    elif taken.get("additionalProperties") is False:
        yield f"{where or '/'}: further properties are refused"


def _arrays(given: _Side, taken: _Side, where: str) -> Iterator[str]:
    if "items" in taken.schema:
        if "items" not in given.schema:
            yield f"{where}[]: elements of any kind"
        else:
            yield from _problems(given.at("items"), taken.at("items"), f"{where}[]")
    ours, theirs = given.get("prefixItems") or [], taken.get("prefixItems") or []
    if theirs and len(ours) != len(theirs):
        yield f"{where}[]: {len(ours)} elements by place, {len(theirs)} are known"
    for index in range(min(len(ours), len(theirs))):
        yield from _problems(
            given.at("prefixItems", index), taken.at("prefixItems", index), f"{where}[{index}]"
        )


def removed(old: Schema, new: Schema) -> list[str]:
    """Properties that ``old`` knows anywhere and ``new`` does not: what is sent in them would be lost in silence."""
    return [f"{name}: removed" for name in sorted(_names(old) - _names(new))]


def _names(root: Schema) -> set[str]:
    models = {"": root, **root.get("$defs", {})}
    return {f"{model}/{name}" for model, schema in models.items() for name in schema.get("properties", {})}

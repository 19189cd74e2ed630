"""An explanation as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from freezepoint.inspection.standing import kept, said
from freezepoint.wording import counted

SHOWN_MAX = 12
"""Of a longer list the first and last few stand for all."""


def as_text(facts: dict[str, Any]) -> str:
    """Everything worth reading, in sections; long lists are shortened."""
    sections = [
        _head(facts),
        _reasons(facts),
        _traces(facts),
        _aside(facts),
        _breaks(facts),
        _letters(facts),
    ]
    return "\n\n".join("\n".join(map(_printable, lines)) for section in sections if (lines := list(section)))


def _printable(line: str) -> str:
    """Ids are a producer's: nothing of them may steer a terminal or begin a line."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in line)


def _head(facts: dict[str, Any]) -> Iterator[str]:
    which = f", life {facts['life']} of {facts['lives']}" if facts["lives"] > 1 else ""
    yield f"rollout {facts['rollout_id']}{which}: {facts['verdict']} ({facts['builder']}, {facts['delivery']})"
    if facts["published"] is not None:
        yield _fact("published", said(facts["published"]))
    yield from (_fact("", remark) for remark in facts["remarks"])
    yield _fact("log", _place(facts))
    if (until := kept(facts)) is not None:
        yield _fact("", f"the topic keeps it {until}")
    ended = ", ".join(f"{name} {value}" for name, value in facts["closing"].items() if name != "event")
    yield _fact("end", f"{facts['closing']['event']}{': ' if ended else ''}{ended}")
    tokens = facts["diagnostics"].get("tokens", {})
    counted = ", ".join(f"{n} {what}" for what, n in tokens.items())
    yield _fact("calls", f"{len(facts['calls'])}; tokens: {counted}")
    if versions := facts["diagnostics"].get("policy_versions"):
        yield _fact("policy", ", ".join(f"{name} {value}" for name, value in versions.items()))
    if facts["error"]:
        yield _fact("error", facts["error"])


def _fact(name: str, text: str) -> str:
    return f"  {name:<11}{text}"


def _place(facts: dict[str, Any]) -> str:
    snapshot = facts["snapshot"]
    return (
        f"partition {snapshot['partition']}, offsets {snapshot['first_offset']} to {snapshot['freeze_offset']}; "
        f"life {facts['life']} of {facts['lives']}"
    )


def _reasons(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["mask_sample"]:
        return
    yield "why it is masked"
    for reason in facts["reasons"]:
        yield f"  {reason['code']}: {reason['meaning']}"
    for name in ("dangling_intents", "unresolved_prefixes"):
        if ids := facts["diagnostics"].get(name):
            yield f"  {name}: {', '.join(_shortened(ids))}"
    if facts["unresolved_retries"]:
        yield f"  undecided between: {', '.join(_shortened(facts['unresolved_retries']))}"
    yield "what would un-mask it"
    yield from (f"  {way}" for way in facts["unmasked_by"] or ["nothing that was tried"])


def _traces(facts: dict[str, Any]) -> Iterator[str]:
    calls = {call["call_id"]: call for call in facts["calls"]}
    traces = facts["traces"]
    half = SHOWN_MAX // 2
    if len(traces) <= SHOWN_MAX:
        yield from _listed(traces, calls)
    else:
        yield from _listed(traces[:half], calls)
        yield f"... {counted(len(traces) - 2 * half, 'more trace')} ..."
        yield from _listed(traces[-half:], calls)


def _listed(traces: Sequence[dict[str, Any]], calls: dict[str, dict[str, Any]]) -> Iterator[str]:
    for trace in traces:
        yield (
            f"{trace['role']}: {counted(trace['tokens'], 'token')}, {trace['sampled_tokens']} sampled, "
            f"weight {trace['weight']:g}"
        )
        yield from (f"  {line}" for line in _shortened([_span(span, calls) for span in trace["calls"]]))


def _span(span: dict[str, Any], calls: dict[str, dict[str, Any]]) -> str:
    call = calls.get(span["call_id"], {})
    link = "" if call.get("link") in (None, "inferred", "root") else f"  {call['link']}"
    version = call.get("policy_version")
    policy = "" if version is None else f"  policy {version}"
    owned = "" if span["owned"] else "  (context here)"
    return f"{span['call_id']}  {span['start']}..{span['end']}{link}{policy}{owned}"


def _aside(facts: dict[str, Any]) -> Iterator[str]:
    aside = [call for call in facts["calls"] if call.get("set_aside")]
    if aside:
        yield "set aside"
        lines = [
            f"{call['call_id']}  {counted(call['generated_tokens'], 'token')}  {call['set_aside']}: {call['why']}"
            for call in aside
        ]
        yield from (f"  {line}" for line in _shortened(lines))


def _breaks(facts: dict[str, Any]) -> Iterator[str]:
    breaks = facts["diagnostics"].get("prefix_breaks", [])
    if breaks:
        yield "where conversations broke"
    for found in breaks:
        named = ", its named parent" if found["named_parent"] else ""
        yield (
            f"  {found['call_id']} shares {counted(found['position'], 'token')} with {found['earlier_call_id']}{named}: "
            f"likely {found['likely']}"
        )
        yield f"    there {found['before']} then {found['earlier_ids']}, here {found['prompt_ids']}"


def _letters(facts: dict[str, Any]) -> Iterator[str]:
    if facts["set_aside_records"]:
        yield "records that could not be used"
        yield from (f"  {line}" for line in _shortened(facts["set_aside_records"]))


def _shortened(lines: Sequence[str]) -> list[str]:
    if len(lines) <= SHOWN_MAX:
        return list(lines)
    half = SHOWN_MAX // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} more ...", *lines[-half:]]

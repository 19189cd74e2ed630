"""How what was built here stands to what was published, in plain data and in words."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from freezepoint.core.choices import DELIVERIES
from freezepoint.core.ledger import Decided, Verdict
from freezepoint.core.views import view
from freezepoint.inspection.finding import Found
from freezepoint.inspection.following import Beginning, LifeState
from freezepoint_schemas.results import Result

PUBLISHED = "published"
NOT_YET = "not_yet"
NEVER = "never"
UNTOLD = "untold"
"""The ledger speaks of a later life, and of the last one only."""


def publication(found: Found, result: Result) -> dict[str, Any] | None:
    """What the ledger says of this life; None where there is no ledger."""
    if found.ledger is None:
        return None
    decided, log = found.ledger.decided, found.log
    if log.first_offset <= decided.freeze_offset <= log.freeze_offset:
        return _published(decided, result)
    if decided.freeze_offset > log.freeze_offset:
        return {"state": UNTOLD}
    if found.life.state is LifeState.CLEARED:
        return {"state": NEVER}
    return {"state": NOT_YET, "applied_offset": found.ledger.applied_offset}


def _published(decided: Decided, result: Result) -> dict[str, Any]:
    built = Verdict.of(result)
    same_log = built.snapshot_id == decided.snapshot_id
    same_verdict = (built.masked, built.reasons) == (decided.masked, decided.reasons)
    return {
        "state": PUBLISHED,
        "outcome": "masked" if decided.masked else "delivered",
        "reasons": [reason.value for reason in decided.reasons],
        "freeze_offset": decided.freeze_offset,
        "snapshot_id": decided.snapshot_id,
        "same_log": same_log,
        "same_verdict": same_verdict,
        "is_delivery": _delivery_of(decided, result) if same_log and not same_verdict else None,
    }


def _delivery_of(decided: Decided, result: Result) -> str | None:
    """The other delivery under which the result says what the published one does."""
    for delivery in DELIVERIES:
        if delivery != result.delivery and tuple(view(result, delivery).reasons) == decided.reasons:
            return delivery
    return None


def verdict(facts: dict[str, Any]) -> str:
    """The published verdict, with the one that was built here where they differ."""
    built, published = "MASKED" if facts["mask_sample"] else "trainable", facts["published"]
    if published is None or published["state"] != PUBLISHED:
        return built
    if _agrees(published):
        return built
    was = "MASKED" if published["outcome"] == "masked" else "delivered"
    return f"published {was}, built here {built}"


def said(published: dict[str, Any]) -> str:
    """What was published, as a line."""
    match published["state"]:
        case "published":
            reasons = f": {', '.join(published['reasons'])}" if published["reasons"] else ""
            return f"{published['outcome']}{reasons}, frozen at offset {published['freeze_offset']}"
        case "not_yet":
            reached = published["applied_offset"]
            return "not yet" + (
                f"; workers have come to offset {reached}" if reached >= 0 else ": no worker was here"
            )
        case "never":
            return "never: it was cleared before its end"
        case _:
            return "a result of its own, if it was not cleared before its end: the ledger tells of the last one only"


def kept(facts: dict[str, Any]) -> str | None:
    """How long the topic keeps the log, as a clause; None where there is nothing to say."""
    until_ms, size = facts["kept_until_ms"], facts["kept_up_to_bytes"]
    if until_ms is None:
        return None if size is None else f"until its partition grows beyond {size} bytes"
    until = datetime.fromtimestamp(until_ms / 1000, UTC).strftime("until %Y-%m-%d %H:%M:%S UTC at least")
    return until if size is None else f"{until}, unless its partition grows beyond {size} bytes"


def remarks(found: Found, facts: dict[str, Any]) -> list[str]:
    """What has to be known before anything else is believed."""
    return [*_of_the_topic(found), *_of_the_end(found), *_of_the_beginning(found), *_of_the_difference(facts)]


def _of_the_topic(found: Found) -> Iterator[str]:
    if found.recreated is not None:
        yield f"NO WORKER WORKS ON THIS LOG: {found.recreated}"


def _of_the_end(found: Found) -> Iterator[str]:
    match found.life.state:
        case LifeState.OPEN:
            yield "still open: no complete event yet; shown as if it completed now"
        case LifeState.CLEARED:
            yield "cleared before its end, unless a worker timed it out before; shown as if it completed then"
        case LifeState.FROZEN | LifeState.GONE:
            pass


def _of_the_beginning(found: Found) -> Iterator[str]:
    start = f"retention has removed everything below offset {found.log_start}"
    match found.life.beginning:
        case Beginning.REMOVED if found.life.state is LifeState.GONE:
            yield "nothing of it is in the topic any more: retention has removed it"
        case Beginning.REMOVED:
            yield f"its beginning is gone ({start}): what is left cannot be judged"
        case Beginning.DOUBTED:
            yield f"its beginning is most likely gone ({start}): what is left is not whole and cannot be judged"
        case Beginning.CARRIED:
            yield "its first records are gone from the topic; the ledger holds them"
        case Beginning.UNKNOWN:
            yield f"{start}: whether some of it was this rollout's is not known"
        case Beginning.KEPT:
            pass


def _of_the_difference(facts: dict[str, Any]) -> Iterator[str]:
    published = facts["published"]
    if published is None or published["state"] != PUBLISHED or _agrees(published):
        return
    here = ", ".join(reason["code"] for reason in facts["reasons"])
    built = f"masked: {here}" if here else "trainable"
    yield (
        f"NOT THE PUBLISHED RESULT: published {_short(published)}; built here "
        f"({facts['builder']}, {facts['delivery']}) {built}"
    )
    if not published["same_log"]:
        yield f"the log is not the one that the worker saw: snapshot {published['snapshot_id']}, here {facts['snapshot']['id']}"
    elif published["is_delivery"]:
        yield f"as {published['is_delivery']} it is what was published: the worker had that delivery"
    else:
        yield "the log is the same: the worker had other settings, or is of another release"


def _short(published: dict[str, Any]) -> str:
    reasons = f": {', '.join(published['reasons'])}" if published["reasons"] else ""
    return f"{published['outcome']}{reasons}"


def _agrees(published: dict[str, Any]) -> bool:
    return bool(published["same_log"] and published["same_verdict"])

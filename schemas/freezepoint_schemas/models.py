"""Every record of the contract by the name of its schema."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from freezepoint_schemas.events import EVENTS
from freezepoint_schemas.ledger import LedgerRecord, ProgressRecord
from freezepoint_schemas.results import Result

RECORDS: Final[dict[str, type[BaseModel]]] = {
    **EVENTS,
    "result": Result,
    "ledger_record": LedgerRecord,
    "progress_record": ProgressRecord,
}

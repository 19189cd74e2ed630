"""What a result is under a delivery that its reader chooses: ``core.views`` by the names that readers know."""

from __future__ import annotations

from typing import Literal, TypeAlias

from freezepoint.core.choices import ALL_TRACES, PER_REQUEST, SINGLE_RESPONSE
from freezepoint.core.views import View, view

__all__ = ["ALL_TRACES", "PER_REQUEST", "SINGLE_RESPONSE", "DeliveryName", "View", "view"]

DeliveryName: TypeAlias = Literal["single_response", "all_traces", "per_request"]

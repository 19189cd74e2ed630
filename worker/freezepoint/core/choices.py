"""The builders and deliveries by name, apart from what does them: to check a setting must not load all of it."""

from __future__ import annotations

PREFIX_MERGING = "prefix_merging"
PER_REQUEST = "per_request"
"""Also stands for a pair where a delivery is chosen: the builder of this name, delivered as all traces."""
BUILDER_NAMES = (PREFIX_MERGING, PER_REQUEST)

SINGLE_RESPONSE = "single_response"
ALL_TRACES = "all_traces"
DELIVERIES = (SINGLE_RESPONSE, ALL_TRACES)
DELIVERY_NAMES = (*DELIVERIES, PER_REQUEST)

"""Many results in a few numbers: how much is masked and why, how much is delivered, how stale it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from freezepoint.core.diagnostics import policy_versions
from freezepoint.core.views import view
from freezepoint_schemas.results import Result

_ROUNDED = 4


@dataclass(slots=True)
class Report:
    """Counts results under one delivery (None: each result's own)."""

    delivery: str | None = None
    results: int = 0
    masked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    not_delivered: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    traces: int = 0
    crossing_refits: int = 0
    spread_sum: int = 0
    spread_max: int = 0
    versions: list[int] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count one result."""
        seen = view(result, self.delivery)
        self.results += 1
        self.masked += seen.masked
        self.reasons.update(reason.value for reason in seen.reasons)
        captured = _captured(result)
        self.tokens["captured"] += captured
        self.tokens["masked" if seen.masked else "delivered"] += seen.sampled_tokens
        self.tokens["not_delivered"] += captured - seen.sampled_tokens
        for why, count in result.diagnostics.get("not_delivered", {}).items():
            self.not_delivered[why] += count["tokens"]
        self.breaks.update(found["likely"] for found in result.diagnostics.get("prefix_breaks", []))
        self.calls += int(result.metrics.get("n_calls", 0))
        self.traces += len(seen.traces)
        self._add_versions(policy_versions(seen.traces))

    def _add_versions(self, versions: dict[str, Any]) -> None:
        self.crossing_refits += versions.get("distinct", 0) > 1
        if "min" in versions:
            spread = versions["max"] - versions["min"]
            self.spread_sum += spread
            self.spread_max = max(self.spread_max, spread)
            bounds = [*self.versions, versions["min"], versions["max"]]
            self.versions = [min(bounds), max(bounds)]

    @property
    def masked_fraction(self) -> float:
        """0.0 where there are no results."""
        return self.masked / self.results if self.results else 0.0

    def summary(self) -> dict[str, Any]:
        """Everything as one JSON object. A result can have several reasons, so theirs add up to more than all masked."""
        captured = self.tokens["captured"]
        return {
            "results": self.results,
            "masked": self.masked,
            "masked_fraction": round(self.masked_fraction, _ROUNDED),
            "reasons": {
                reason: {"results": count, "fraction": round(count / self.results, _ROUNDED)}
                for reason, count in self.reasons.most_common()
            },
            "tokens": {
                name: self.tokens[name] for name in ("captured", "delivered", "masked", "not_delivered")
            },
            "delivered_fraction": round(self.tokens["delivered"] / captured, _ROUNDED) if captured else 0.0,
            "tokens_set_aside": dict(self.not_delivered.most_common()),
            "calls": self.calls,
            "traces": self.traces,
            "likely_prefix_breaks": dict(self.breaks.most_common()),
            "policy_versions": {
                "min": self.versions[0] if self.versions else None,
                "max": self.versions[1] if self.versions else None,
                "spread_mean": round(self.spread_sum / self.results, _ROUNDED) if self.results else 0.0,
                "spread_max": self.spread_max,
                "rollouts_crossing_refits": self.crossing_refits,
            },
        }


def _captured(result: Result) -> int:
    """Tokens that were sampled in this rollout, as far as its records were read."""
    account: dict[str, int] = result.diagnostics.get("tokens", {})
    return int(account.get("captured", result.metrics.get("generated_tokens_captured", 0)))

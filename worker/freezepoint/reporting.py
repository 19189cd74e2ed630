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
    """Counts results under one delivery (None: each result's own).

    ``policy_version``: what results are behind (None: the newest version that any of them has).
    """

    delivery: str | None = None
    policy_version: int | None = None
    results: int = 0
    masked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    not_delivered: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    traces: int = 0
    crossing_refits: int = 0
    spreads: Counter[int] = field(default_factory=Counter)
    oldest: Counter[int] = field(default_factory=Counter)
    """By the oldest policy version of a result: how many results. As ``spreads``, of those whose versions are numbers."""
    newest: int | None = None

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
            self.oldest[versions["min"]] += 1
            self.spreads[versions["max"] - versions["min"]] += 1
            self.newest = versions["max"] if self.newest is None else max(self.newest, versions["max"])

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
            "policy_versions": self._policy_versions(),
        }

    def _policy_versions(self) -> dict[str, Any]:
        """Spread: between the oldest and the newest version of one result. Lag: how far its oldest is behind."""
        current = self.newest if self.policy_version is None else self.policy_version
        lags = Counter(
            {current - oldest: count for oldest, count in self.oldest.items()} if current is not None else {}
        )
        return {
            "results": self.oldest.total(),
            "min": min(self.oldest, default=None),
            "max": self.newest,
            "spread_mean": _mean(self.spreads),
            "spread_max": max(self.spreads, default=None),
            "rollouts_crossing_refits": self.crossing_refits,
            "lag_to": current,
            "lag_mean": _mean(lags),
            "lag_max": max(lags, default=None),
        }


def _mean(counted: Counter[int]) -> float | None:
    """None without any."""
    return (
        round(sum(value * count for value, count in counted.items()) / counted.total(), _ROUNDED)
        if counted
        else None
    )


def _captured(result: Result) -> int:
    """Tokens that were sampled in this rollout, as far as its records were read."""
    account: dict[str, int] = result.diagnostics.get("tokens", {})
    return int(account.get("captured", result.metrics.get("generated_tokens_captured", 0)))

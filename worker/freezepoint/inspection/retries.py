"""Why one of several calls with the same prompt was kept and another set aside."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from freezepoint.core.builder import BuildOutput
from freezepoint.core.prefixes import Node
from freezepoint.core.snapshot import ResolvedCall, Snapshot
from freezepoint_schemas.reasons import NotDelivered


@dataclass(frozen=True, slots=True)
class Retries:
    """The retry groups of a rollout: calls with one parent and one prompt, in call order."""

    output: BuildOutput
    _members: dict[tuple[str | None, Node], list[ResolvedCall]] = field(default_factory=dict)
    _continued: set[str | None] = field(default_factory=set)

    @classmethod
    def of(cls, snapshot: Snapshot, output: BuildOutput) -> Retries:
        members: defaultdict[tuple[str | None, Node], list[ResolvedCall]] = defaultdict(list)
        continued: set[str | None] = set()
        for call in snapshot.calls:
            link = output.links.get(call.call_id)
            if link is None or output.not_delivered.get(call.call_id) is NotDelivered.AFTER_TERMINAL:
                continue
            members[link.call_id, call.prompt_node].append(call)
            if call.call_id not in output.quarantined:
                continued.add(link.call_id)
        return cls(output, dict(members), continued)

    def why(self, call: ResolvedCall) -> str:
        """Why this call, which is not the kept one of its group, was set aside."""
        group = self._members[self.output.links[call.call_id].call_id, call.prompt_node]
        kept = [member.call_id for member in group if member.call_id not in self.output.quarantined]
        continued = [call_id for call_id in kept if call_id in self._continued]
        if continued:
            return f"a retry: its sibling {continued[0]} was gone on from, and it by no call that counts"
        if call.call_id not in self.output.unresolved_retries and kept:
            return f"a retry: its sibling {kept[0]} is the call that the rollout ended with"
        return (
            "a retry that nothing decides: neither it nor any sibling was gone on from, and which one counted is not known; "
            f"{group[0].call_id} only comes first by its id"
        )

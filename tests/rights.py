"""The rights that ``deploy/kafka/acls.sh`` grants, as the script itself says, and granting them to a real broker."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aiokafka.protocol.admin import CreateAclsRequest

from freezepoint.transport.kafka import KafkaTransport

FOLDER = Path(__file__).parents[1] / "deploy" / "kafka"
SCRIPT = FOLDER / "acls.sh"
TABLE = FOLDER / "acls.tsv"

RESOURCES = {"topic": 2, "group": 3, "transactional_id": 5}
OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Describe": 8,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
}
PATTERNS = {"literal": 3, "prefixed": 4}
ALLOW = 3


@dataclass(frozen=True, slots=True)
class Right:
    """One row: ``operation`` on ``resource`` of that name, or of every name that begins with it."""

    principal: str
    operation: str
    resource: str
    name: str
    pattern: str


def granted(role: str, principal: str, **names: str) -> list[Right]:
    """What the script would grant. ``names``: PREFIX, GROUP and TRANSACTIONS.

    :raises subprocess.CalledProcessError: it knows no such role.
    """
    environment = {"PATH": os.environ["PATH"], "KAFKA_ACLS": "echo", **names}
    done = subprocess.run(
        [str(SCRIPT), role, principal], env=environment, capture_output=True, text=True, check=True
    )
    return [_right(line.split()) for line in done.stdout.splitlines()]


def _right(arguments: list[str]) -> Right:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--add", action="store_true", required=True)
    for name in ("--allow-principal", "--operation", "--resource-pattern-type"):
        parser.add_argument(name, required=True)
    resource = parser.add_mutually_exclusive_group(required=True)
    for name in RESOURCES:
        resource.add_argument(f"--{name.replace('_', '-')}")
    given = vars(parser.parse_args(arguments))
    kind = next(name for name in RESOURCES if given[name] is not None)
    return Right(
        given["allow_principal"], given["operation"], kind, given[kind], given["resource_pattern_type"]
    )


async def grant(root: KafkaTransport, rights: Iterable[Right]) -> None:
    """Grant them, as a super user. They reach the broker's authorizer a moment later."""
    admin = await root._cluster.admin()
    for right in rights:
        request = CreateAclsRequest(
            RESOURCES[right.resource],
            right.name,
            PATTERNS[right.pattern],
            right.principal,
            "*",
            OPERATIONS[right.operation],
            ALLOW,
        )
        response = await admin._send_to_controller(request)
        assert [code for code, *_ in response.creation_responses] == [0]

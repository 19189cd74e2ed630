from tests.contract.conftest import cluster, transport_url
from tests.integration.shell import events, shell

__all__ = ["cluster", "events", "shell", "transport_url"]

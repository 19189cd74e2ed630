from tests.contract.conftest import cluster, transport_url
from tests.integration.oauth_kafka import oauth
from tests.integration.secured_kafka import secured
from tests.integration.shell import events, shell

__all__ = ["cluster", "events", "oauth", "secured", "shell", "transport_url"]

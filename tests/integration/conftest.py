from tests.contract.conftest import cluster, transport_url

__all__ = ["cluster", "transport_url"]

"""Settings: keyword arguments, then ``FREEZEPOINT_`` environment variables (``__`` nests), then one TOML file. Names that are no
setting are refused, see ``origins``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_serializer,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from freezepoint.addresses import shown_url
from freezepoint.errors import ConfigurationError
from freezepoint.origins import CONFIG, check_environment, first_problem, read_file
from freezepoint_schemas.topics import TopicNames

DEFAULT_BROKER = "sqlite:///freezepoint.db"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KafkaSettings(_Section):
    """How to reach a Kafka cluster.

    ``sasl_oauth_…``: where OAUTHBEARER tokens come from, a file that somebody keeps fresh or an OIDC token endpoint.
    """

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "SCRAM-SHA-512"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_oauth_token_file: Path | None = None
    sasl_oauth_token_url: str | None = None
    sasl_oauth_client_id: str | None = None
    sasl_oauth_client_secret: SecretStr | None = None
    sasl_oauth_client_secret_file: Path | None = None
    sasl_oauth_scope: str | None = None
    sasl_oauth_ca_file: Path | None = None
    ssl_ca_file: Path | None = None
    ssl_cert_file: Path | None = None
    ssl_key_file: Path | None = None
    ssl_key_password: SecretStr | None = None
    ssl_check_hostname: bool = True
    client_id: str = "freezepoint"
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    transactional_id_prefix: str = "freezepoint"
    request_timeout_ms: Annotated[int, Field(ge=1_000)] = 30_000
    session_timeout_ms: Annotated[int, Field(ge=1_000)] = 10_000
    heartbeat_interval_ms: Annotated[int, Field(ge=100)] = 3_000
    max_poll_interval_ms: Annotated[int, Field(ge=10_000)] = 300_000
    transaction_timeout_ms: Annotated[int, Field(ge=1_000)] = 60_000
    fetch_max_bytes: Annotated[int, Field(ge=1024)] = 50 * 1024 * 1024
    partition_fetch_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024

    @field_serializer("sasl_oauth_token_url", when_used="json")
    def _without_secrets(self, url: str | None) -> str | None:
        return None if url is None else shown_url(url)


class SqliteSettings(_Section):
    """How the embedded transport behaves. ``partitions``: of the topics that the first use of a new file creates."""

    partitions: Annotated[int, Field(ge=1, le=1024)] = 4
    record_bytes_max: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    session_timeout_ms: Annotated[int, Field(ge=100)] = 10_000
    heartbeat_interval_ms: Annotated[int, Field(ge=10)] = 1_000
    poll_interval_ms: Annotated[int, Field(ge=1)] = 10
    idle_poll_interval_ms: Annotated[int, Field(ge=1)] = 50
    poll_bytes_max: Annotated[int, Field(ge=1024)] = 32 * 1024 * 1024
    busy_timeout_ms: Annotated[int, Field(ge=100)] = 60_000
    synchronous: Literal["FULL", "NORMAL"] = "FULL"


class WorkerSettings(_Section):
    """The worker's behaviour and limits.

    ``keep_attributed_chains``: see ``core/losses.py``. ``evidence_dir``: where the frozen logs of masked rollouts are kept.
    ``masked_fraction_max``: of ``masked_fraction_window`` results; more masked ones raise an alarm in the log.
    """

    group: Annotated[str, Field(min_length=1)] = "freezepoint"
    builder: str = "prefix_merging"
    delivery: str = "single_response"
    poll_timeout_ms: Annotated[int, Field(ge=1)] = 200
    poll_records_max: Annotated[int, Field(ge=1)] = 500
    flush_interval_ms: Annotated[int, Field(ge=0)] = 5
    transaction_results_max: Annotated[int, Field(ge=1)] = 200
    transaction_bytes_max: Annotated[int, Field(ge=1024)] = 32 * 1024 * 1024
    publish_timeout_ms: Annotated[int, Field(ge=1_000)] = 30_000
    progress_interval_ms: Annotated[int, Field(ge=10)] = 5_000
    pending_bytes_max: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    record_bytes_max: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024
    rollout_bytes_max: Annotated[int, Field(ge=1024)] = 1024 * 1024 * 1024
    rollout_entries_max: Annotated[int, Field(ge=1)] = 100_000
    memory_bytes_max: Annotated[int, Field(ge=0)] = 512 * 1024 * 1024
    spool_folder: Path | None = None
    spool_bytes_max: Annotated[int, Field(ge=0)] = 64 * 1024 * 1024 * 1024
    dead_letter_ratio_max: Annotated[float, Field(ge=0, le=1)] = 0.5
    dead_letter_window: Annotated[int, Field(ge=1)] = 1_000
    topic_check_interval_s: Annotated[float, Field(gt=0)] = 60.0
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    replay_bytes_max: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    trace_tokens_max: Annotated[int, Field(ge=1)] = 1 << 27
    keep_attributed_chains: bool = False
    mask_routes_mismatch: bool = False
    masked_fraction_max: Annotated[float, Field(ge=0, le=1)] = 1.0
    masked_fraction_window: Annotated[int, Field(ge=1)] = 100
    evidence_dir: Path | None = None
    evidence_bytes_max: Annotated[int, Field(ge=0)] = 10 * 1024 * 1024 * 1024
    evidence_age_s_max: Annotated[float, Field(gt=0)] = 14 * 24 * 60 * 60.0
    rollout_timeout_s: Annotated[float, Field(gt=0)] = 6 * 60 * 60.0
    inline_build_bytes_max: Annotated[int, Field(ge=0)] = 2 * 1024 * 1024
    shutdown_timeout_s: Annotated[float, Field(gt=0)] = 30.0


class HttpSettings(_Section):
    """Where a worker answers ``/``, ``/livez``, ``/readyz``, ``/metrics`` and ``/status``; nowhere without a port.

    ``turn_s_max``: a poll loop that has not turned for so long is stuck. ``broker_wait_s_max``: waiting for the broker is
    alive for so long; after that a new process may have more luck.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    turn_s_max: Annotated[float, Field(gt=0)] = 60.0
    broker_wait_s_max: Annotated[float, Field(gt=0)] = 900.0


class TracingSettings(_Section):
    """Whether a worker traces rollouts by OpenTelemetry (``freezepoint[otel]``); where to is told by ``OTEL_…`` variables."""

    enabled: bool = False


class ReaderSettings(_Section):
    """A trainer's reader: its consumer group, and the limits of what it holds.

    ``prefetch_…``: results that are ready and not asked for yet; beyond it, reading pauses. ``group_…``: results in groups
    that are not complete yet; beyond it, the oldest group is handed out as it is. ``remembered_…``: how many results and
    groups are known again when they are repeated or late. ``broker_patience_s``: how long a broker may fail a reader that
    has read before, until it gives up; ``sole_reader_timeout_s``: how long a reader of groups waits for every partition.
    """

    group: Annotated[str, Field(min_length=1)] = "freezepoint-trainer"
    poll_timeout_ms: Annotated[int, Field(ge=1)] = 200
    poll_records_max: Annotated[int, Field(ge=1)] = 200
    prefetch_results_max: Annotated[int, Field(ge=1)] = 256
    prefetch_bytes_max: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    group_results_max: Annotated[int, Field(ge=1)] = 100_000
    group_bytes_max: Annotated[int, Field(ge=1)] = 1024 * 1024 * 1024
    result_bytes_max: Annotated[int, Field(ge=1024)] = 1024 * 1024 * 1024
    remembered_results_max: Annotated[int, Field(ge=1)] = 100_000
    remembered_groups_max: Annotated[int, Field(ge=1)] = 10_000
    commit_interval_ms: Annotated[int, Field(ge=0)] = 1_000
    close_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    sole_reader_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    broker_patience_s: Annotated[float, Field(ge=0)] = 300.0


class Settings(BaseSettings):
    """Everything that can be set.

    ``broker``: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or ``kafka://host:port,host:port``.
    ``FREEZEPOINT_CONFIG`` names the TOML file.
    """

    model_config = SettingsConfigDict(
        env_prefix="FREEZEPOINT_", env_nested_delimiter="__", extra="ignore", frozen=True
    )

    broker: str = DEFAULT_BROKER
    topic_prefix: str = ""
    kafka: KafkaSettings = KafkaSettings()
    sqlite: SqliteSettings = SqliteSettings()
    worker: WorkerSettings = WorkerSettings()
    http: HttpSettings = HttpSettings()
    tracing: TracingSettings = TracingSettings()
    reader: ReaderSettings = ReaderSettings()

    @field_validator("broker")
    @classmethod
    def _holds_no_credentials(cls, broker: str) -> str:
        """A broker's address is shown in messages, by ``config`` and by ``ps``."""
        if not broker.startswith("sqlite:") and "@" in broker:
            raise ValueError(
                "there is no place for credentials in it: write kafka://host:port, and set kafka.sasl_username and "
                "kafka.sasl_password (FREEZEPOINT_KAFKA__SASL_USERNAME, FREEZEPOINT_KAFKA__SASL_PASSWORD)"
            )
        return broker

    @property
    def topics(self) -> TopicNames:
        return TopicNames(self.topic_prefix)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, the environment over the file.

        :raises ConfigurationError: the environment or the file names a setting that there is not.
        """
        check_environment(settings_cls)
        path = os.environ.get(CONFIG)
        file = (InitSettingsSource(settings_cls, read_file(path, settings_cls)),) if path else ()
        return (init_settings, env_settings, *file)


def load(**given: Any) -> Settings:
    """The effective settings. Arguments that are None were not given.

    :raises ConfigurationError: a name or a value is wrong; the message says which, and where it was set.
    """
    arguments = {name: value for name, value in given.items() if value is not None}
    try:
        return Settings(**arguments)
    except ValidationError as error:
        raise ConfigurationError(first_problem(error, arguments, Settings)) from None
    except SettingsError as error:
        raise ConfigurationError(str(error)) from None

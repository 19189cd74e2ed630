"""For model servers: publishes what a rollout's calls generated. NeMo Gym takes ``freezepoint.sink:TokenSink`` by name."""

from freezepoint.sink.token_sink import TokenSink

__all__ = ["TokenSink"]

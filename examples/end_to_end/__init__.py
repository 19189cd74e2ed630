"""A model server, an agent, a worker and a trainer, end to end: ``python -m examples.end_to_end``."""

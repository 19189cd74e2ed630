"""A model server, an agent, a worker and a trainer, end to end: ``python -m examples.end_to_end``, in a checkout with the
development install (``pip install -e '.[dev]'``)."""

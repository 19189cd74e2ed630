"""A model server, an agent, a worker and a trainer, end to end: ``python -m examples.end_to_end``, in a checkout with the
development install (``pip install -c constraints.txt -e '.[dev]'``)."""

from importlib.util import find_spec

_missing = [name for name in ("openai", "uvicorn") if find_spec(name) is None]
if _missing:
    raise SystemExit(
        f"error: {' and '.join(_missing)} not installed: .venv/bin/pip install -c constraints.txt -e '.[dev]'"
    )

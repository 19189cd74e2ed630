"""What model servers really return, as token entries: whole responses, streams, and an ASGI middleware around the server."""

from freezepoint.capture.entries import entry_from_response, entry_from_stream
from freezepoint.capture.middleware import CaptureMiddleware
from freezepoint.errors import CaptureError

__all__ = ["CaptureError", "CaptureMiddleware", "entry_from_response", "entry_from_stream"]

"""The page: one file that needs nothing else, and the policy that forbids a browser everything but it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

PAGE: Final = files(__package__).joinpath("page.html").read_bytes()


def _hashes(element: str) -> str:
    """By these alone a browser runs or applies what stands inside such elements: nothing that was slipped in."""
    bodies = re.findall(rf"<{element}>(.*?)</{element}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}'" for body in bodies)


POLICY: Final = (
    f"default-src 'none'; style-src {_hashes('style')}; script-src {_hashes('script')}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

"""Hosts and URLs, as they are told to people and as they are trusted."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def shown_url(url: str) -> str:
    """For people and logs: without user information and query, where a secret may stand."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "…"
    place = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{'…@' if place[1] else ''}{place[2]}{parts.path}{'?…' if parts.query else ''}"


def names_a_host(host: str) -> bool:
    """Whether it can be looked up at all: the resolver raises no error of its own for an empty or overlong label."""
    return can_be_written(host, "idna")


def is_loopback(host: str) -> bool:
    """Whether this names the machine itself. A page elsewhere whose name was made to lead here asks by its own name, and is
    told nothing."""
    if host.lower() in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def can_be_written(text: str, encoding: str) -> bool:
    """Whether the encoding has bytes for all of it."""
    try:
        text.encode(encoding)
    except UnicodeError:
        return False
    return True

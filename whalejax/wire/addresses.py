"""Addresses as text. This module imports nothing, so that every process can use it."""

from __future__ import annotations


def joined_address(host: str, port: int) -> str:
    """Joins host and port, with an IPv6 address in brackets.

    >>> joined_address("node0", 8476), joined_address("fd00::2", 8476)
    ('node0:8476', '[fd00::2]:8476')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

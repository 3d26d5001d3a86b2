"""Errors of plans that cannot be checked."""

from __future__ import annotations

from whalejax.meshes.errors import WhaleError


class CheckError(WhaleError):
    """The plan was not checked, so its numbers are unknown; the text has the reason."""

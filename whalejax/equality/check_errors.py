"""Errors of plans that cannot be checked."""

from __future__ import annotations

from whalejax.meshes.errors import WhaleError


class CheckError(WhaleError):
    """A plan that was not checked, and why: nothing is known of its numbers."""

"""What all members of a run must have in common, compared before one is admitted."""

from __future__ import annotations

from collections.abc import Mapping


def difference(facts: Mapping[str, str], known: Mapping[str, str]) -> str:
    """In what a member differs from those that are there; nothing where it does not.

    Args:
        facts: of the member.
        known: of the others.

    >>> difference({"jax": "0.10.1"}, {"jax": "0.10.2"})[:66]
    'this member differs from the others: jax is 0.10.1, not 0.10.2. Ru'
    """
    wrong = [
        f"{name} is {facts.get(name, 'not told')}, not {known.get(name, 'told')}"
        for name in sorted({*facts, *known})
        if facts.get(name) != known.get(name)
    ]
    if not wrong:
        return ""
    return (
        f"this member differs from the others: {'; '.join(wrong)}. Run the same code, "
        "versions, data and optimizer in all"
    )

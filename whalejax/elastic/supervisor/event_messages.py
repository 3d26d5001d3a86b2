"""Messages to the user about the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from whalejax.distributed.standard_streams import say_in_background
from whalejax.journals.status import loss_text
from whalejax.membership.exit_status import Ending
from whalejax.meshes.units import count_text


_PROGRESS: Final = frozenset(
    {"adding_up", "begun", "leaving", "tables_placed", "recovered", "saved"}
)
"""Events that a quiet run does not print."""


def reduction_text(by: str, why: str) -> str:
    """Describes how gradients are reduced.

    >>> reduction_text("messages", "there is one process")
    'gradients are reduced by messages: there is one process'
    """
    return f"gradients are reduced by {by}: {why}"


def event_message(event: str, fields: Mapping[str, Any], *, quiet: bool = False) -> str:
    """Returns the message to the user about an event.

    The message is empty if an event has none. If ``quiet``, it is also empty for events
    of progress.
    """
    if quiet and event in _PROGRESS:
        return ""
    match event:
        case "begun":
            names, step = ", ".join(fields["members"]), fields["step"]
            # At step -1 no member has a state; the first that gets one reports it.
            whence = f" from step {step}" if step >= 0 else ""
            return f"generation {fields['generation']}{whence}: {names}"
        case "recovered":
            verb = "goes on from" if fields["step"] else "begins with"
            return f"the run {verb} {fields['source']}"
        case "adding_up":
            return reduction_text(fields["by"], fields["why"])
        case "lost":
            what = "failed" if fields.get("how") == Ending.FAILED else "is lost"
            return f"{fields['name']} {what}: {loss_text(fields)}"
        case "refused" | "leaving" | "note":
            return f"{fields['name']}: {fields['why']}"
        case "left":
            return f"{fields['name']}: its loop was left at step {fields['step']}"
        case "agent_joined":
            most = f"it holds at most {count_text(fields['room'], 'process')}"
            return f"agent {fields['agent']} at {fields['host']} joined; {most}"
        case "agent_lost":
            return f"agent {fields['agent']} is lost: {fields['why']}"
        case "agent_left":
            return f"agent {fields['agent']} was asked to end, and left"
        case "agent_refused":
            return f"agent {fields['agent']} is refused: {fields['why']}"
        case "not_started":
            return f"a process could not be started: {fields['why']}"
        case "slot_held":
            return (
                f"process {fields['pid']} ({fields['name']}) keeps its GPUs: "
                f"{fields['why']}. Its slot stays empty until it ends"
            )
        case "saved":
            return f"checkpoint {fields['path']}"
        case "not_saved":
            return f"no checkpoint after step {fields['step']}: {fields['why']}"
        case "tables_placed":
            return f"from step {fields['step']}, {fields['why']}"
        case "not_copied":
            return f"no copies in memory, and the run goes on: {fields['why']}"
        case "unfit":
            return (
                f"there is no plan for {count_text(fields['count'], 'process')}: "
                f"{fields['why']}"
            )
        case "short":
            left = len(fields["members"])
            are = "is" if left == 1 else "are"
            return (
                f"{count_text(left, 'member')} {are} left, of at least "
                f"{fields['least']}; waiting for others"
            )
    return ""


def tell_user(text: str) -> None:
    """Prints a line to standard error; never blocks, even if nobody reads it."""
    if text:
        say_in_background(f"whalejax: {text}")

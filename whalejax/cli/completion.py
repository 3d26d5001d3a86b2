"""Shell completion of the command line: ``whalejax completion``.

tyro writes a script that contains the commands and options as one literal. This module
adds what tyro cannot know to that literal: reference models, kinds of devices, mesh
axes, and the commands of ``whalejax swarm`` and ``whalejax jobs``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from whalejax.api.named_jobs import model_names
from whalejax.meshes.catalogue import entries
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.planner.plan.report.export import FORMS
from whalejax.planner.sharding.layout import MESH_AXES
from whalejax.planner.step_options import REMAT_POLICIES


_LITERAL: Final = re.compile(r"^COMPLETION_SPEC = (.*)$", re.MULTILINE)
_TAKING_MODELS: Final = (
    *("train", "plan", "search", "batch"),
    *("swarm join", "swarm serve", "jobs add"),
)
"""Commands whose first argument is a model."""


def completion_script(
    shell: str,
    parse: Callable[[list[str]], Any],
    groups: Mapping[str, Callable[[list[str]], Any]],
) -> str:
    """Returns the completion script of a shell.

    Args:
        shell: ``"bash"``, ``"zsh"`` or ``"fish"``.
        parse: Parses the words of a command, as tyro does.
        groups: Parser of each command with subcommands, such as ``"swarm"``, by name.
    """
    text = _printed(shell, parse)
    match = _LITERAL.search(text)
    if match is None:
        return text
    spec = _spec(shell, match[1])
    for name, parse_group in groups.items():
        other = _LITERAL.search(_printed(shell, parse_group))
        if other is not None:
            spec["subcommands"][name] = _spec(shell, other[1])
    for _, command in _by_name(spec):
        _with_choices(command)
    code = repr(spec) + _MODELS.format(models=model_names(), commands=_TAKING_MODELS)
    if shell == "fish":
        code = re.sub(r'(["\\$])', r"\\\1", code)
    return text[: match.start(1)] + code + text[match.end(1) :]


def _spec(shell: str, literal: str) -> Any:
    if shell == "fish":  # Its literal is inside double quotes.
        literal = re.sub(r'\\(["\\$])', r"\1", literal)
    return ast.literal_eval(literal)


_MODELS: Final = """
def _with_models(spec, group=""):
    for name, command in spec["subcommands"].items():
        if group + name in {commands}:
            command["subcommands"] = {{
                model: {{**command, "description": model, "subcommands": {{}}}}
                for model in {models}
            }}
        else:
            _with_models(command, group + name + " ")
_with_models(COMPLETION_SPEC)
"""
"""Code that adds the models when the script runs, which keeps its literal short."""


def _printed(shell: str, parse: Callable[[list[str]], Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse(["--tyro-print-completion", shell])
    return printed.getvalue()


def _choices() -> dict[str, list[str]]:
    clusters = [f"{kind}:8" for kind in entries()]
    return {
        "--cluster": [*clusters, "local"],
        "--on": clusters,
        "--topology": [*clusters, "local"],
        "--remat": list(REMAT_POLICIES),
        "--precision": list(PRECISIONS),
        "--attention": ["ring", "gather"],
        "--mesh": [f"{axis}=" for axis in MESH_AXES],
        "--combine": ["mean", "adasum", "adasum_nodes", "adasum_updates"],
        "--to": list(FORMS),
        "--export": list(FORMS),
        "--wire": ["f32", "bf16", "int8"],
        "--sum-wire": ["f32", "f16", "int8"],
        "--price": [f"{kind}=" for kind in entries()],
    }


def _with_choices(command: dict[str, Any]) -> None:
    choices = _choices()
    for option in command["options"]:
        # A shell would offer each further line as a word.
        option["description"] = " ".join(option["description"].split())
        for flag in option["flags"]:
            if flag in choices:
                option["type"] = "choice"
                option["choices"] = choices[flag]


def _by_name(spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    result = []
    for name, command in spec["subcommands"].items():
        result.append((name, command))
        result += _by_name(command)
    return result

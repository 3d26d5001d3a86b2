"""Reference models for tests, benchmarks, notebooks and the command line.

This module imports neither JAX nor Flax, so that ``whalejax --help`` lists the models
at once. The module of a model is imported when the model is requested.

>>> "gpt" in available()
True
"""

if __name__ == "models":
    raise ImportError("import whalejax.models, not models")

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.models.common.names import check_options, pick


if TYPE_CHECKING:
    from whalejax.user_code.losses import Job

__all__ = ["available", "job", "widened"]


def __dir__() -> list[str]:
    return sorted(__all__)


_NAMES: Final = {
    "bert-base": ("bert", "base"),
    "bert-large": ("bert", "large"),
    "bert-test": ("bert", "test"),
    "cosmoflow": ("cosmoflow", "128"),
    "cosmoflow-test": ("cosmoflow", "test"),
    "dlrm": ("dlrm", "quick"),
    "dlrm-kaggle": ("dlrm", "kaggle"),
    "dlrm-test": ("dlrm", "test"),
    "dlrm-v2": ("dlrm", "v2"),
    "gnmt": ("gnmt", "base"),
    "gnmt-test": ("gnmt", "test"),
    "gpt": ("gpt", "quick"),
    "gpt-small": ("gpt", "small"),
    "gpt-medium": ("gpt", "medium"),
    "gpt-large": ("gpt", "large"),
    "gpt-xl": ("gpt", "xl"),
    "gpt-test": ("gpt", "test"),
    "hstu-dlrm-v4": ("hstu", "dlrm-v4"),
    "hstu-test": ("hstu", "test"),
    "llama-7b": ("llama", "7b"),
    "llama-8b": ("llama", "8b"),
    "llama-70b": ("llama", "70b"),
    "llama-405b": ("llama", "405b"),
    "llama-test": ("llama", "test"),
    "m6-10b": ("m6", "10b"),
    "m6-test": ("m6", "test"),
    "mlp": ("mlp", "default"),
    "mlp-test": ("mlp", "test"),
    "moe": ("moe", "small"),
    "moe-test": ("moe", "test"),
    "resnet50": ("resnet", "resnet50"),
    "resnet-test": ("resnet", "test"),
    "t5-small": ("t5", "small"),
    "t5-base": ("t5", "base"),
    "t5-large": ("t5", "large"),
    "t5-test": ("t5", "test"),
    "unet3d": ("unet3d", "paper"),
    "unet3d-test": ("unet3d", "test"),
    "vgg16": ("vgg", "16"),
    "vgg-test": ("vgg", "test"),
}


def available() -> tuple[str, ...]:
    """Returns the names that ``job`` accepts, sorted.

    >>> available()[:2]
    ('bert-base', 'bert-large')
    """
    return tuple(sorted(_NAMES))


def widened(name: str, overrides: Mapping[str, Any]) -> dict[str, int]:
    """Returns other sizes of a model in proportion to a given width.

    Args:
        name: One of ``available()``.
        overrides: Changes of the configuration, by name.

    Returns:
        ``mlp`` and ``heads`` in proportion to ``embed``. Sizes are left out that the
        model lacks, that were given, or that would not be integers.

    >>> widened("gpt-small", {"embed": 12_288})
    {'mlp': 49152, 'heads': 192}
    >>> widened("llama-7b", {"embed": 8192, "heads": 64})
    {'mlp': 22016}
    """
    module_name, size = pick(name, _NAMES, "model")
    if not isinstance(overrides, Mapping):
        raise WhaleError(
            f"overrides is {short_repr(overrides)}; expected options by name"
        )
    sizes = importlib.import_module(f"whalejax.models.{module_name}").SIZES
    base, embed = sizes[size], overrides.get("embed")
    if not isinstance(embed, int) or not getattr(base, "embed", 0):
        return {}
    result = {}
    for option in ("mlp", "heads"):
        whole, rest = divmod(getattr(base, option, 0) * embed, base.embed)
        if whole > 0 and not rest and option not in overrides:
            result[option] = whole
    return {} if embed == base.embed else result


def option_names(name: str) -> tuple[str, ...]:
    """Returns the names of the fields of a model's configuration.

    >>> "hidden" in option_names("mlp"), "hidden" in option_names("gpt")
    (True, False)
    """
    module_name, size = pick(name, _NAMES, "model")
    sizes = importlib.import_module(f"whalejax.models.{module_name}").SIZES
    return tuple(field.name for field in dataclasses.fields(sizes[size]))


def job(name: str, **overrides: Any) -> "Job":
    """Returns the job of a reference model: its loss, model, batches and optimizer.

    Args:
        name: One of ``available()``.
        overrides: ``batch_size``, ``learning_rate`` and ``seed``, and any field of the
            model's configuration, such as ``layers=2`` or ``annotated=False``.

    Returns:
        Job that ``whalejax train`` runs.

    Raises:
        WhaleError: No model has that name, or the model has no such option.

    >>> job("mlp", batch_size=64).batch_size
    64
    """
    module_name, size = pick(name, _NAMES, "model")
    check_options(overrides)
    module = importlib.import_module(f"whalejax.models.{module_name}")
    made: Job = module.job(size, **overrides)
    return made

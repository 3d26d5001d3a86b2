"""Steps that begin where a run was: what makes a script fit for being started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast


if TYPE_CHECKING:
    import os

    from whalejax.runtime.state import TrainState
    from whalejax.runtime.train_step import TrainStep


class FromNewest:
    """What a compiled step has of it; apart, as it reads folders and not plans."""

    def restore_or_init(
        self,
        folder: str | os.PathLike[str],
        make_model: Callable[..., Any],
        *,
        rng: Any,
    ) -> TrainState:
        """The newest whole checkpoint in a folder, or a new state where there is none.

        A script that begins with it and saves as ``folder/step_000100`` can be ended
        and started again at any time, with other processes too.

        Args:
            folder: where checkpoints are saved; it need not exist. Damaged ones are
                renamed, with a warning.
            make_model, rng: as for ``init``.

        Raises:
            WhaleError: a checkpoint is another model's, or all are damaged.
        """
        from whalejax.cli.train_loop import checkpoints
        from whalejax.meshes.checks import Arguments
        from whalejax.meshes.errors import warn
        from whalejax.runtime.resume import resumed

        problems = Arguments("TrainStep.restore_or_init")
        problems.path("folder", folder, "the path of a folder of checkpoints")
        problems.raise_if_any()
        step = cast("TrainStep", self)
        found = resumed(step, checkpoints(Path(folder)))
        if found is None:
            return step.init(make_model, rng=rng)
        for note in found.notes:
            warn(note)
        return found.state

"""Training text: the source files of Python's standard library, without a download.

They suffice to train a byte-level model for minutes.
"""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from whalejax.meshes.errors import WhaleError
from whalejax.models.common.batches import Batch, chain_tokens, generator


BYTES: Final = 256

_NOT_LIBRARY: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_DEFAULT_MAX_BYTES: Final = 8_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Random windows of a text, which depend on the seed and the step.

    Attributes:
        data: Full text, uint8.
        sequence: Bytes in a model's context; a window has one byte more.
        seed: Seed of the sequence of batches.
    """

    data: npt.NDArray[np.uint8]
    sequence: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data.size <= self.sequence:
            raise WhaleError(
                f"the text holds {self.data.size} bytes; windows of sequence + 1 = "
                f"{self.sequence + 1} bytes were asked for. Give more text or a "
                "shorter sequence."
            )

    def batch(self, step: int, size: int) -> Batch:
        """Returns the global batch of one step, the same in every process.

        Args:
            step: Number of the batch, from 0.
            size: Number of windows.

        Returns:
            ``{"tokens": int32[size, sequence + 1]}``; the first rows do not depend on
            ``size``.

        >>> text = Text(data=np.arange(100, dtype=np.uint8), sequence=4)
        >>> text.batch(0, 2)["tokens"].shape
        (2, 5)
        """
        last = self.data.size - self.sequence
        starts = generator(self.seed, step).integers(0, last, size=size)
        index = starts[:, None] + np.arange(self.sequence + 1)[None, :]
        return {"tokens": self.data[index].astype(np.int32)}


def standard_library(
    sequence: int,
    *,
    seed: int = 0,
    max_bytes: int = _DEFAULT_MAX_BYTES,
    root: Path | None = None,
) -> Text:
    """Returns the Python standard library's source as training text.

    Args:
        sequence: Bytes in a model's context.
        seed: Seed of the sequence of batches.
        max_bytes: Maximum number of bytes to read, from files sorted by path.
        root: Folder to read; default: the running interpreter's library.

    Raises:
        WhaleError: The folder has no source file, or too little text.

    >>> standard_library(128).batch(0, 4)["tokens"].shape
    (4, 129)
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    return Text(data=_source_bytes(folder, max_bytes), sequence=sequence, seed=seed)


def tokens(vocab: int, sequence: int, step: int, size: int, *, seed: int) -> Batch:
    """Returns sequences for a next-token model of any vocabulary.

    Args:
        vocab: Different tokens; 256 gives bytes of the standard library, any other
            number synthetic sequences that follow a rule.
        sequence: Tokens in a model's context.
        step: Number of the batch, from 0.
        size: Number of sequences.
        seed: Seed of the sequence of batches.

    Returns:
        ``{"tokens": int32[size, sequence + 1]}``.

    >>> tokens(512, 24, 0, 2, seed=0)["tokens"].shape
    (2, 25)
    """
    if vocab == BYTES:
        return standard_library(sequence, seed=seed).batch(step, size)
    length = sequence + 1
    made = chain_tokens(step, size, length=length, vocab=vocab, seed=seed)
    return {"tokens": made}


@functools.cache
def _source_bytes(folder: Path, max_bytes: int) -> npt.NDArray[np.uint8]:
    parts: list[bytes] = []
    total = 0
    for path in _source_files(folder):
        content = path.read_bytes()[: max_bytes - total]
        parts.append(content)
        total += len(content)
        if total >= max_bytes:
            break
    if total == 0:
        raise WhaleError(
            f"no Python source was found under {folder}: expected *.py files of the "
            "standard library, found 0 bytes. Some distributions ship it compiled "
            "only; give a folder that holds source, as in "
            'text.standard_library(128, root=Path("src")).'
        )
    data = np.frombuffer(b"".join(parts), np.uint8)
    data.setflags(write=False)
    return data


def _source_files(folder: Path) -> list[Path]:
    """Returns library files by relative path, an order that all machines share."""
    result = (path.relative_to(folder) for path in folder.rglob("*.py"))
    library = [path for path in result if not _NOT_LIBRARY.intersection(path.parts)]
    by_name = sorted(library, key=lambda path: path.as_posix())
    return [folder / path for path in by_name if (folder / path).is_file()]

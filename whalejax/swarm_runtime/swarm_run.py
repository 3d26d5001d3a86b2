"""The process of ``whalejax swarm serve``, which leads a swarm's run.

It has the registry and the primary trainer. It continues from the checkpoints and the
journal of its folder.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from whalejax.journals.journal import JournalLines, read
from whalejax.meshes.errors import WhaleError
from whalejax.state.async_checkpoints import Saver
from whalejax.state.resume import hold_folder
from whalejax.swarm_runtime.checkpoints import Checkpoints
from whalejax.swarm_runtime.peer import Peer
from whalejax.swarm_runtime.registry_server import RegistryServer
from whalejax.swarm_runtime.stage_moves import PERIOD_SECONDS, StageMover
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.swarm_runtime.trainers.trainer_state import Settings, Snapshot, Tell
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.run_messages import Report


KEY: Final = "swarm.key"
RETRY_SECONDS: Final = (1.0, 5.0, 20.0)
"""Seconds before each further attempt to write the last checkpoint after a failure."""

LEDGER: Final = "ledger.jsonl"
_FOLDER: Final = "swarm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmRunPaths:
    """Folder, address, wire formats and periods of a run.

    Attributes:
        save: Folder of checkpoints and of the journal; None saves neither.
        save_every: Steps between checkpoints.
        keep: Number of checkpoints to keep.
        key: Path of the swarm's key file, which is created if missing.
        host, port: Address of the registry.
        wire: Wire format of tensors.
        sum_wire: Wire format of gradients during their reduction.
        lease_seconds: Seconds for which a peer's announcement is valid.
        rebalance_seconds: Seconds between checks of the peers' loads.
    """

    save: Path | None = None
    save_every: int = 100
    keep: int = 3
    key: Path = field(default_factory=lambda: Path(KEY))
    host: str = "127.0.0.1"
    port: int = 0
    wire: str = "f32"
    sum_wire: str = "f32"
    lease_seconds: float = 10.0
    rebalance_seconds: float = PERIOD_SECONDS


class SwarmRun:
    """A run led by this process.

    Attributes:
        serving: Registry and trainer of the run.
        peers: Peers in threads of this process.
    """

    def __init__(
        self,
        cut: StagedJob,
        place: SwarmRunPaths,
        settings: Settings,
        tell: Tell,
        *,
        peers: int = 0,
        listening: socket.socket | None = None,
    ) -> None:
        """Reads the newest checkpoint, and listens.

        Args:
            cut: Staged job.
            place: Folder, address, wire formats and periods of the run.
            settings: Settings of the run.
            tell: Function that receives each event's kind and fields.
            peers: Number of peers in threads of this process.
            listening: Socket that already listens on the registry's address.

        Raises:
            WhaleError: A file cannot be read or written, or the address is not
                available.
        """
        make_key(place.key)
        key = load_key(place.key)
        self._cut, self._place, self._tell = cut, place, tell
        self._checkpoints = Checkpoints(cut)
        self._stack = contextlib.ExitStack()
        self._journal: JournalLines | None = None
        self._lock = threading.Lock()
        with self._stack:  # Close everything if the run cannot be opened.
            snapshot, generation = self._open_folder()
            self._saver = Saver(
                self._checkpoints,
                place.save,
                place.save_every,
                place.keep,
                self._tell_saved,
            )
            self.serving = RegistryServer(
                cut,
                key,
                settings,
                wire=place.wire,
                sum_wire=place.sum_wire,
                host=place.host,
                port=place.port,
                listening=listening,
                lease_seconds=place.lease_seconds,
                tell=self._on_event,
                write=None if self._journal is None else self._write,
                snapshot=snapshot,
                generation=generation,
                on_snapshot=self._save,
                rebalance=StageMover(cut.stages, period=place.rebalance_seconds),
            )
            self._stack = self._stack.pop_all()
        self._key = key
        self.peers: list[Peer] = []
        self._count = peers
        self._settings = settings

    def _open_folder(self) -> tuple[Snapshot | None, int]:
        """Locks the folder; returns its newest snapshot and an unused generation."""
        save = self._place.save
        if save is None:
            return None, 0
        self._stack.enter_context(hold_folder(save))
        snapshot, notes = self._checkpoints.newest(save) or (None, ())
        for note in notes:
            self._tell("note", why=note)
        if snapshot is not None:
            self._tell("restored", step=snapshot.step)
        folder = save / _FOLDER
        with _explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        generation = _generations(folder / LEDGER)
        self._journal = JournalLines(folder / LEDGER, durable=False)
        self._write("opened", {"generation": generation})
        return snapshot, generation

    def run(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Runs the steps.

        Yields:
            Number of completed steps, and metrics.
        """
        try:
            for _ in range(self._count):
                peer = Peer(
                    self._cut,
                    self._key,
                    self.serving.address,
                    wire=self._place.wire,
                    sum_wire=self._place.sum_wire,
                    # So a peer that waits for another one still answers in time.
                    pull_seconds=self._settings.call_seconds / 3,
                )
                self.peers.append(peer)
                peer.start()
            yield from self.serving.run()
            self._write_last()
        finally:
            self._saver.wait()
            self.close()

    def _write_last(self) -> None:
        """Repeats a failed write of the last checkpoint after each delay."""
        for seconds in RETRY_SECONDS:
            self._saver.wait()
            last = self.snapshot()
            if not self._saver.is_due(last.step, self._settings.steps):
                return
            why = f"the checkpoint of step {last.step} is tried again in {seconds:g} s"
            self._tell("note", why=why)
            time.sleep(seconds)
            self._save(last)

    def close(self) -> None:
        """Ends this process's part of the run."""
        for peer in self.peers:
            peer.close()
        self.serving.close()
        self._stack.close()

    def _tell_saved(self, report: Report) -> None:
        fields = {n: x for n, x in report.fields.items() if n != "number"}
        self._tell(report.kind, **fields)

    def snapshot(self) -> Snapshot:
        """Returns the newest snapshot."""
        return self.serving.trainer.newest

    def _on_event(self, kind: str, **more: Any) -> None:
        if kind == "went back":
            self._write("opened", {"generation": self.serving.trainer.generation})
        self._tell(kind, **more)

    def _write(self, event: str, fields: Any) -> None:
        if self._journal is None:
            return
        with self._lock:
            before = self._journal.problem
            self._journal.write(event, fields)
            problem = self._journal.problem
        if problem and problem != before:
            self._tell("not written", why=f"the ledger's journal: {problem}")

    def _save(self, snapshot: Snapshot) -> None:
        if self._saver.is_due(snapshot.step, self._settings.steps):
            state = self._checkpoints.state_of(snapshot)
            self._saver.save(state, snapshot.step)


@contextlib.contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WhaleError(
            f"{path}: nothing can be written there ({error.strerror or error}). Give "
            "--save a folder that can be written"
        ) from error


def _generations(path: Path) -> int:
    """Returns the first unused generation of a journal; 0 without a journal."""
    known = [e.get("generation") for e in read(path) if e["event"] == "opened"]
    return 1 + max((n for n in known if type(n) is int), default=-1)

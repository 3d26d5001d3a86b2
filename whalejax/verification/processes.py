"""Runs the compiling process, or another, with a deadline, and returns its output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from whalejax.verification.targets import Target
from whalejax.verification.targets import VerifyError as VerifyError


_LAST_WORDS = 2000
_NOISE = (
    "could not determine TPU",
    "unexpected worker hostname",
    "Source Location Trace",
    "libtpu_init_utils",
    "Logging before InitGoogle",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a compilation or another task.

    Attributes:
        data: Answer of the worker.
        words: Output of the worker, such as messages of the compiler.
    """

    data: Mapping[str, Any]
    words: str


class CompileTask(Protocol):
    """Request that a separate process carries out."""

    @property
    def target(self) -> Target:
        """Devices that the request needs."""
        ...


def run(
    request: CompileTask,
    *,
    limit_seconds: float,
    extra_paths: Sequence[str] = (),
    worker: str = "whalejax.verification.compile_worker",
    task: str = "",
    limit_name: str = "--timeout",
    xla_flags: str = "",
) -> Answer:
    """Compiles, or runs another task, in a separate process.

    Args:
        request: Request to carry out.
        limit_seconds: Seconds after which the process is ended.
        extra_paths: Folders of packages that the process needs besides those of this
            process; default: none.
        worker: Module that the process runs.
        task: Name of the task, for errors; default: compiling.
        limit_name: Option by which the user sets ``limit_seconds``, for errors.
        xla_flags: Additional flags of XLA.

    Raises:
        VerifyError: The request cannot be pickled, or the process died or did not end
            in time. If the process failed, the message ends with its output.
    """
    compiles = not task
    task = task or f"compiling for {request.target.words}"
    with tempfile.TemporaryDirectory(prefix="whalejax-verify-") as folder:
        asked, answered = Path(folder, "request"), Path(folder, "answer")
        said = Path(folder, "words")
        asked.write_bytes(_pickled(request))
        with said.open("wb") as words:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", worker),
                    *(str(asked), str(answered), str(limit_seconds)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                env=_with_flags(_environment(request.target, extra_paths), xla_flags),
                start_new_session=True,
            )
            try:
                status = process.wait(limit_seconds)
            except subprocess.TimeoutExpired as error:
                raise VerifyError(
                    f"{task} did not end in {limit_seconds:.0f} s and was stopped; "
                    f"{limit_name} gives it longer. {_last(said)}"
                ) from error
            finally:
                _end(process)
        text = said.read_text(errors="replace")
        if not answered.exists():
            ended = f"the compiler for {request.target.words}" if compiles else task
            raise VerifyError(
                f"{ended} ended its process ({_status(status)}) without an answer. "
                f"{_last(said)}"
            )
        return Answer(data=json.loads(answered.read_text()), words=text)


_UNTIMED = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Flags that replace the timing of kernels, which needs a GPU.

cuBLAS then computes products, because untimed Triton kernels fail for some sizes.
"""


def _pickled(request: CompileTask) -> bytes:
    import jax

    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:
        return pickle.dumps(settings) + _by_value(request)
    except Exception as error:  # Objects of the user may raise anything.
        raise VerifyError(
            f"the loss, the model or the optimizer cannot be sent to another process: "
            f"{error}. Create its locks, open files and the like elsewhere"
        ) from error


def _by_value(request: Any) -> bytes:
    """Pickles a request together with definitions from the user's program.

    A ``jax.custom_vjp`` is sent as its attributes and rebuilt from them. It may be
    recursive.
    """
    import cloudpickle
    import jax

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is jax.custom_vjp:
                return object.__new__, (jax.custom_vjp,), vars(obj)
            return super().reducer_override(obj)

    with contextlib.ExitStack() as kept, io.BytesIO() as file:
        for module in list(sys.modules.values()):
            if _lives_here_only(module):
                kept.callback(cloudpickle.unregister_pickle_by_value, module)
                cloudpickle.register_pickle_by_value(module)
        Pickler(file).dump(request)
        return file.getvalue()


def _lives_here_only(module: Any) -> bool:
    """Returns whether no other process can import a module by its name.

    Modules made by hand have no file. Modules loaded from a file may be outside the
    import path. For a part of a package, its package decides. ``__main__`` does not
    count, because cloudpickle sends its definitions anyway.
    """
    if not isinstance(module, types.ModuleType):
        return False
    name = module.__name__
    if name == "__main__" or sys.modules.get(name) is not module:
        return False
    top = name.partition(".")[0]
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if spec is None:
        return True
    if spec.origin is None or not spec.has_location:
        return False  # The module is built in, or a package of several folders.
    inside = spec.submodule_search_locations is not None
    folder = os.path.dirname(spec.origin)
    folder = os.path.dirname(folder) if inside else folder
    if folder in sys.path or os.path.realpath(folder) in map(
        os.path.realpath, sys.path
    ):
        return False
    return not any(finder.find_spec(top, None) for finder in sys.meta_path)


_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def _environment(target: Target, extra_paths: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a worker.

    A worker that compiles for absent devices uses virtual ones. The worker sees the
    packages of this process. ``extra_paths`` come last, so this environment's packages
    take precedence.
    """
    environment = dict(os.environ)
    paths = [p or os.getcwd() for p in sys.path if os.path.isdir(p or ".")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *extra_paths])
    if target.platform == "local":
        _virtual_devices(environment, target.num_devices)
        if target.kind == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        # This process may already hold most of the device's memory.
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return environment
    environment["JAX_PLATFORMS"] = "cpu"
    if target.platform == "tpu":
        environment["TPU_SKIP_MDS_QUERY"] = "1"
        environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    else:
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} {_UNTIMED}".strip()
    return environment


def _virtual_devices(environment: dict[str, str], count: int) -> None:
    name = "--xla_force_host_platform_device_count"
    flags = environment.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(name)]
    environment["XLA_FLAGS"] = " ".join([*kept, f"{name}={count}"])
    environment.pop("JAX_NUM_CPU_DEVICES", None)


def _with_flags(environment: dict[str, str], xla_flags: str) -> dict[str, str]:
    flags = f"{environment.get('XLA_FLAGS', '')} {xla_flags}".strip()
    return {**environment, "XLA_FLAGS": flags} if xla_flags else environment


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def _last(said: Path) -> str:
    lines = [
        line
        for line in said.read_text(errors="replace").splitlines()
        if line.strip() and not any(noise in line for noise in _NOISE)
    ]
    words = "\n".join(lines)[-_LAST_WORDS:]
    return f"Its last words:\n{words}" if words else "It said nothing"

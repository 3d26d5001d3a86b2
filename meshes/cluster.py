"""``Cluster``, and the functions that make, load and save clusters.

``cluster_text`` parses short texts, ``cluster_toml`` and ``paddle_json`` read files,
and ``detect`` reads the running devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_printable, short_repr
from whalejax.meshes.cluster_data import ClusterData
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.formats import cluster_toml, paddle_json
from whalejax.meshes.formats.cluster_text import parse
from whalejax.meshes.topology import COMPILERS as COMPILERS
from whalejax.meshes.topology import CompilerProfile as CompilerProfile
from whalejax.meshes.topology import Level as Level
from whalejax.meshes.topology import Node as Node


@names_arguments(
    "wh.Cluster",
    instance="cluster",
    instead='From text: wh.cluster("h100:8").',
)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Cluster(ClusterData):
    """Devices in the order in which meshes use them, and their links.

    Attributes:
        nodes: Nodes in order; devices are numbered node by node.
        levels: Levels of links, innermost first. The product of their sizes is the
            number of devices.
        compiler: Behaviour of the platform's compiler.
        links: Bytes per second from each device to each other device, as
            ``links[from][to]``. Empty if the levels describe all links.

    Raises:
        WhaleError: The sizes of the levels do not multiply to the number of devices,
            kinds are of several platforms, or numbers are invalid; lists all problems.

    Example:
        >>> from whalejax.meshes import cluster
        >>> c = cluster("h100:4x8")
        >>> c.num_devices, [(level.name, level.size) for level in c.levels]
        (32, [('nvlink', 8), ('infiniband', 4)])
        >>> print(c)
        32×H100 (4 nodes of 8, nvlink + infiniband)
    """

    @classmethod
    def of(cls, data: ClusterData) -> Cluster:
        """Returns the cluster with this data.

        Raises:
            WhaleError: The data describe no cluster.
        """
        problems = Arguments("Cluster.of")
        problems.of("data", data, ClusterData, "the data of a cluster")
        problems.raise_if_any()
        if isinstance(data, cls):
            return data
        return cls(
            nodes=data.nodes,
            levels=data.levels,
            compiler=data.compiler,
            links=data.links,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers that ``from_json`` reads."""
        return cluster_toml.to_data(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """Returns the cluster that ``to_json`` described.

        Raises:
            WhaleError: Keys are unknown, or values missing or invalid; lists all
                problems.
        """
        problems = Arguments("Cluster.from_json")
        problems.of("data", data, Mapping, "what Cluster.to_json gave")
        problems.raise_if_any()
        return cls.of(cluster_toml.from_data(data, "cluster"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a TOML file that ``load`` reads."""
        _check_path("Cluster.save", path)
        cluster_toml.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Reads a TOML file.

        Raises:
            WhaleError: The file does not exist, is no TOML, or is invalid.
        """
        _check_path("Cluster.load", path)
        return cls.of(cluster_toml.load(path))

    @classmethod
    def from_paddle(cls, path: str | os.PathLike[str]) -> Cluster:
        """Reads PaddlePaddle's description of a cluster; see ``paddle_json``.

        Raises:
            WhaleError: The file does not exist, is no JSON, or is invalid.
        """
        _check_path("Cluster.from_paddle", path)
        return cls.of(paddle_json.load(path))

    @classmethod
    def detect(cls, calibrate: bool = True) -> Cluster:
        """Starts JAX, and returns its devices as a cluster.

        Args:
            calibrate: Whether to measure the devices, which takes about 20 s, unless
                a measurement is cached. False uses the numbers of the catalogue.

        Raises:
            WhaleError: A kind is unknown, or several CPU processes run.
        """
        from whalejax.meshes.detect import detect

        problems = Arguments("Cluster.detect")
        problems.switch("calibrate", calibrate)
        problems.raise_if_any()
        return cls.of(detect(calibrate=calibrate))

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        from whalejax.display.clusters import bundle

        return bundle(self)


@names_arguments("wh.cluster", instead='Write wh.cluster("h100:8").')
def cluster(text: str) -> Cluster:
    """Returns the cluster that a short text describes; see ``cluster_text``.

    ``h100:8`` is one node of 8 devices, ``h100:4x8`` four nodes of 8, ``v5p:4x4x4`` a
    TPU torus, and ``v100-32:8+p100-16:8`` has nodes of two kinds. ``mixed.toml`` is a
    file, and ``paddle.json`` a file of PaddlePaddle. ``local`` means the devices of
    this process. ``a100`` means ``a100-80``, its variant with the most memory.

    Raises:
        WhaleError: The text, or the file that it names, is invalid.

    Example:
        >>> cluster("v5p:4x4x4").describe()
        '64×TPU v5p (torus 4×4×4)'
    """
    if not (is_printable(text) or (isinstance(text, str) and not text)):
        raise WhaleError(
            f"cluster: text is {short_repr(text)}; expected a cluster such as "
            "'h100:8', 'v5p:4x4x4' or a .toml file"
        )
    stripped = text.strip()
    if stripped.lower() == "local":
        return Cluster.detect()
    if stripped.lower().endswith(".toml"):
        return Cluster.load(stripped)
    if stripped.lower().endswith(".json"):
        return Cluster.from_paddle(stripped)
    return Cluster.of(parse(text))


def _check_path(title: str, path: object) -> None:
    problems = Arguments(title)
    problems.path("path", path)
    problems.raise_if_any()

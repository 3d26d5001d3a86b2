"""The hardware: device kinds, clusters, links, and their measurements.

Importing this package imports no JAX. Import the modules that need JAX by name:
``whalejax.meshes.jax_mesh`` makes a ``jax.sharding.Mesh``, and
``whalejax.meshes.calibration.calibrate`` measures the local devices.
"""

if __name__ == "meshes":
    raise ImportError("import whalejax.meshes, not meshes")

from whalejax.meshes.catalogue import device_kind as device_kind
from whalejax.meshes.catalogue import kind_names as kind_names
from whalejax.meshes.cluster import Cluster as Cluster
from whalejax.meshes.cluster import CompilerProfile as CompilerProfile
from whalejax.meshes.cluster import Level as Level
from whalejax.meshes.cluster import Node as Node
from whalejax.meshes.cluster import cluster as cluster
from whalejax.meshes.device_kinds import BandwidthPoint as BandwidthPoint
from whalejax.meshes.device_kinds import DeviceKind as DeviceKind
from whalejax.meshes.device_kinds import MatmulPoint as MatmulPoint
from whalejax.meshes.device_kinds import Source as Source
from whalejax.meshes.device_kinds import TimedModel as TimedModel
from whalejax.meshes.errors import Problems as Problems
from whalejax.meshes.errors import WhaleError as WhaleError

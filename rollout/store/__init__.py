"""Trajectories on disk, as Parquet that any reader of Parquet understands.

`schema` documents the columns, `file` is one file, `dataset` a directory that a run appends to. Knows results only:
neither the service nor who trains on them.
"""

from rollout.store.dataset import TrajectoryStore, scan
from rollout.store.file import TrajectoryWriter, read_trajectories, scan_file, write_trajectories
from rollout.store.schema import SCHEMA, SCHEMA_VERSION, Stored, to_row

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Stored",
    "TrajectoryStore",
    "TrajectoryWriter",
    "read_trajectories",
    "scan",
    "scan_file",
    "to_row",
    "write_trajectories",
]

"""Sizes of the tables of public recommenders, for benchmarks, tests and examples.

- Criteo-Kaggle: the 26 cardinalities in the training scripts of DLRM and TorchRec.
- DLRM-v2: MLPerf Training v3, ``--num_embeddings_per_feature`` and
  ``--multi_hot_sizes`` of its reference.
- DLRMv4: recommendation_v4 of MLPerf Training v6.1 (mlcommons/training). It has item,
  artist, album and user, and seven crosses of up to 100 million rows, together 282
  million. The individual sizes of the smaller crosses are not published.
"""

from __future__ import annotations

from typing import Final

from whalejax.planner.tables.table import Table


KAGGLE_ROWS: Final = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
DLRM_V2_ROWS: Final = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956),
    *(405282, 10, 2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152),
    *(12973, 108, 36),
)
DLRM_V2_LOOKUPS: Final = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
DLRM_V4_ROWS: Final = {
    "item": 9_390_000,
    "artist": 1_290_000,
    "album": 3_370_000,
    "user": 1_000_000,
    "cross_0": 100_000_000,
    "cross_1": 80_000_000,
    "cross_2": 40_000_000,
    "cross_3": 30_000_000,
    "cross_4": 15_000_000,
    "cross_5": 10_000_000,
    "cross_6": 7_000_000,
}
_V4_HISTORY: Final = 1020  # Half of the longest history, which is 2,039.


def kaggle_tables(width: int = 16) -> list[Table]:
    """Returns the 26 tables of Criteo-Kaggle, with 4 bytes of optimizer state per row.

    >>> sum(table.rows for table in kaggle_tables())
    33762577
    """
    return [
        Table(name=f"c{i}", rows=rows, width=width)
        for i, rows in enumerate(KAGGLE_ROWS)
    ]


def dlrm_v2_tables(width: int = 128) -> list[Table]:
    """Returns the 26 tables of MLPerf's DLRM-v2, with its multi-hot sizes.

    >>> sum(table.rows for table in dlrm_v2_tables())
    204184588
    """
    sizes = zip(DLRM_V2_ROWS, DLRM_V2_LOOKUPS, strict=True)
    return [
        Table(name=f"c{i}", rows=rows, width=width, lookups_per_sample=lookups)
        for i, (rows, lookups) in enumerate(sizes)
    ]


def dlrm_v4_tables(width: int = 512) -> list[Table]:
    """Returns the 11 tables of MLPerf's DLRMv4.

    Users are looked up once per sample, all others once per event of a history.

    >>> sum(table.rows for table in dlrm_v4_tables()) // 1_000_000
    297
    """
    return [
        Table(
            name=name,
            rows=rows,
            width=width,
            lookups_per_sample=1 if name == "user" else _V4_HISTORY,
            pooled=False,
        )
        for name, rows in DLRM_V4_ROWS.items()
    ]

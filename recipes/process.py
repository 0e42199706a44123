"""What this process sets for the libraries below it, before they are imported; the user's own settings win.

OpenMP threads that spin at barriers make decoding on a busy CPU five times as slow: OMP_WAIT_POLICY. torch keeps up to
1,024 oneDNN primitives, about a megabyte each; packed rows bring new shapes all the time, so that a training run on a
CPU would grow by a gigabyte for a gain of 5 %: LRU_CACHE_CAPACITY.
"""

import os

SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": "2000", "LRU_CACHE_CAPACITY": "16"}


def prepare_process() -> None:
    """Set what the environment does not. Call before torch is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)

"""How many files this process may open."""

from __future__ import annotations

import resource

# 1,024 rings, the locks of 256 pods' folders and what else there is need no more.
ENOUGH = 16_384


def allow_enough() -> None:
    """Shells and containers commonly allow 1,024 at first, as many as there may be rings."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

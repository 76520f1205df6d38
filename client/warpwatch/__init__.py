"""The shim of Warpwatch: reports the steps of a training process to the daemon of the node.

    import warpwatch

    monitor = warpwatch.attach(job="llama-7b")
    for batch in monitor.wrap(loader):
        with monitor.step(samples=len(batch)):
            with monitor.phase("forward"):
                ...

attach.py is the process's one monitor, monitor.py its face, steps.py the clock of the training
thread, helper_thread.py what runs beside it, ring.py the file between shim and daemon.
"""

from __future__ import annotations

from warpwatch._version import __version__
from warpwatch.attach import attach
from warpwatch.monitor import Monitor

__all__ = ["Monitor", "__version__", "attach"]

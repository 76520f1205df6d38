"""A job over several nodes whose ranks meet in memory: real shims, no torch, steps that sleep.

``played_job.py JOB UID FAULTS NODES``: every node, named by its folder, has RANKS_OF_NODE ranks,
which run as the user UID. The file FAULTS says what is wrong now, a line each, such as ``slow 3``.
"""

# Another user may not be able to read the interpreter's own files.
import encodings.ascii
import encodings.idna  # noqa: F401
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import warpwatch
from warpwatch import helper_thread  # noqa: F401

RANKS_OF_NODE = 2
STEP_S, SLOW_S, DATA_S = 0.1, 0.08, 0.15


def main() -> None:
    # A process that a shell starts in the background ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job, uid, faults, *nodes = sys.argv[1:]
    uuids = os.environ["PLAYED_GPUS"].split(",")
    ranks = RANKS_OF_NODE * len(nodes)
    meeting = multiprocessing.get_context("fork").Barrier(ranks)
    for rank in range(ranks):
        if os.fork():
            continue
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
        node = Path(nodes[rank // RANKS_OF_NODE])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % RANKS_OF_NODE),
            "WORLD_SIZE": str(ranks),
            "WARPWATCH_DIR": str(node / "run"),
            "WARPWATCH_INBOX": str(node / "inbox"),
            "WARPWATCH_ATTACH_INTERVAL_S": "0.2",
            "WARPWATCH_GPU_UUID": uuids[rank],
            # The parent's, as a launcher names a run on all nodes.
            "WARPWATCH_RUN": str(os.getppid()),
        }
        train(job, rank, Path(faults), meeting)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def train(job: str, rank: int, faults: Path, meeting: Barrier) -> None:
    monitor = warpwatch.attach(job=job)

    def suffers(fault: str) -> bool:
        return f"{fault} {rank}" in faults.read_text().splitlines()

    while True:
        with monitor.step(samples=8):
            if suffers("data"):
                with monitor.phase("data_wait"):
                    time.sleep(DATA_S)
            with monitor.phase("forward"):
                time.sleep(STEP_S + SLOW_S * suffers("slow"))
                while suffers("hang"):
                    time.sleep(0.1)
                if suffers("crash"):
                    raise RuntimeError("a label is out of range")
                if suffers("oom"):
                    raise MemoryError("cannot allocate 64 GiB")
            with monitor.phase("comm"):
                meeting.wait()


if __name__ == "__main__":
    main()

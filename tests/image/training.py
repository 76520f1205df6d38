"""A rank without torch, for containers: steps, and the names of what else it can see."""

import os
import time

import warpwatch

monitor = warpwatch.attach(job=os.environ["JOB"])
# The shared folders as this container sees them: other tenants must not be among them.
for folder in ("/run/warpwatch", "/var/lib/warpwatch/inbox"):
    # The daemon opens each to all users of the pod when it first sees it.
    while not os.access(folder, os.R_OK | os.X_OK):
        time.sleep(0.1)
    print(folder, sorted(os.listdir(folder)), flush=True)
while True:
    with monitor.step(samples=1):
        time.sleep(0.02)

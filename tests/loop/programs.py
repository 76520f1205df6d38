"""Training programs for the tests, started with ``python -c``."""

# A small real training with a fixed seed. Prints one JSON line: a digest of all losses, the
# number of steps, and the dearest call into the shim in milliseconds of its thread's CPU time.
SEEDED = """
import hashlib, json, sys, time
import torch
import warpwatch

torch.set_num_threads(1)
torch.manual_seed(0)
steps = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
digest = hashlib.sha256()
dearest = 0
monitor = warpwatch.attach(job="seeded")
for number in range(steps):
    batch = torch.randn(32, 64)
    began = time.thread_time_ns()
    step = monitor.step(samples=32)
    step.__enter__()
    dearest = max(dearest, time.thread_time_ns() - began)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    digest.update(repr(loss.item()).encode())
    time.sleep(0.004)
    began = time.thread_time_ns()
    step.__exit__(None, None, None)
    dearest = max(dearest, time.thread_time_ns() - began)
print(json.dumps({"losses": digest.hexdigest(), "steps": steps, "dearest_ms": dearest / 1e6}))
"""

# One rank that only steps, each argv[1] seconds long, and prints every 50th; as the user argv[2] if
# there is one: everything is imported before root's rights are given up.
STEPPING = """
import os, sys, time
import warpwatch
from warpwatch import helper_thread
import encodings.ascii, encodings.idna

for uid in map(int, sys.argv[2:]):
    os.setgid(uid), os.setuid(uid)
monitor = warpwatch.attach(job="stepping")
number = 0
while True:
    with monitor.step(samples=4):
        time.sleep(float(sys.argv[1]))
    number += 1
    if number % 50 == 0:
        print("step", number, flush=True)
"""

# One rank of the job argv[1] with steps of 50 ms, until the file argv[2] is there. Then it prints
# how many; with a further argument it fails.
STEPPING_UNTIL = """
import os, sys, time, warpwatch
monitor = warpwatch.attach(job=sys.argv[1])
steps = 0
while not os.path.exists(sys.argv[2]):
    with monitor.step():
        time.sleep(0.05)
    steps += 1
if sys.argv[3:]:
    raise RuntimeError("as it was asked to")
print("steps", steps, flush=True)
"""

# One rank of a real training, for ``warpwatch run``; its data takes long while the file argv[1] is
# there. Its steps are long, so that a busy machine does not make it wait for data as well.
LOADING = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.25 if os.path.exists(sys.argv[1]) else 0.0)
        return torch.full((8,), float(index))

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in DataLoader(Numbers(), batch_size=2):
    loss = model(batch / 1e6).square().mean()
    loss.backward()
    time.sleep(0.1)
    optimizer.step()
    optimizer.zero_grad()
"""

# A short job each second until it is killed, forked for speed: each of another user where it may
# be, every fifth killed, the others end in order; one that no daemon has seen says so. argv[1]: how
# many steps of 20 ms.
SHORT_JOBS = """
import itertools, os, signal, sys, time
import warpwatch
from warpwatch import helper_thread
import encodings.ascii, encodings.idna

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for number in itertools.count():
    if os.fork() == 0:
        if os.getuid() == 0:
            os.setgid(20000 + number % 16), os.setuid(20000 + number % 16)
        monitor = warpwatch.attach(job=f"short-{number}")
        for _ in range(int(sys.argv[1])):
            with monitor.step(samples=4):
                time.sleep(0.02)
        if monitor.clock.ring is None:
            print(f"short-{number} found no daemon", flush=True)
        if number % 5 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    time.sleep(1.0)
"""

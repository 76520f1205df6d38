"""XIDs of programs on the GPU, of the driver and its firmware, and of engines that they feed."""

from __future__ import annotations

from warpwatch_telemetry.xid import Xid

_DEBUG = (
    "Restart the job. If it comes again on other GPUs too, look for the bug with compute-sanitizer"
)
_OTHER_GPU = "; if it stays with one GPU, run `dcgmi diag -r 3` there."
_COPIES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_DECODERS = (68, 83, 84, 88, 89, 96, 97, 98)
_ENCODERS = (65, 73, 142)
_JPEG = (82, *range(99, 106))
_OPTICAL_FLOW = (86, 139)


def _engine(number: int, name: str, work: str) -> Xid:
    return Xid(
        number,
        f"{name} error",
        f"An engine that {work} met an error; the work that used it was ended.",
        "unknown",
        "warning",
        "Restart the job. If it comes again, update the driver; if it stays with one GPU, have "
        "that GPU tested.",
    )


_PROGRAMS = (
    Xid(
        8,
        "GPU stopped processing",
        "Work on the GPU made no progress for so long that the driver ended it.",
        "application",
        "warning",
        _DEBUG + _OTHER_GPU,
    ),
    Xid(
        11,
        "Invalid command stream",
        "The GPU was given commands that it cannot make sense of.",
        "application",
        "warning",
        _DEBUG + _OTHER_GPU,
    ),
    Xid(
        13,
        "Exception in a kernel",
        "A kernel did something it must not: mostly an array index out of bounds, or an illegal "
        "instruction or register.",
        "application",
        "warning",
        _DEBUG + _OTHER_GPU,
    ),
    Xid(
        25,
        "Illegal command",
        "A program gave the GPU a command that it may not give.",
        "application",
        "warning",
        _DEBUG + _OTHER_GPU,
    ),
    Xid(
        31,
        "Memory page fault",
        "A kernel or a copy used an address on the GPU that is not mapped: mostly a bad pointer, "
        "or memory used after it was freed.",
        "application",
        "warning",
        _DEBUG + _OTHER_GPU,
    ),
    Xid(
        32,
        "Corrupted command stream",
        "Commands were damaged on their way from the host to the GPU. The PCIe link is suspected "
        "before the program is.",
        "system",
        "warning",
        "Restart the job. If it comes again, look at the PCIe replay and error counters, and "
        "reseat the GPU or its riser.",
    ),
    Xid(
        43,
        "Program ended after its own fault",
        "A program on the GPU caused a fault and was ended; the GPU is well.",
        "application",
        "warning",
        "Read the job's own log for the first error. Nothing is to be done about the GPU.",
    ),
    Xid(
        45,
        "Work removed from the GPU",
        "The driver cleaned up after a program that ended or was killed, or after another error "
        "on the same GPU.",
        "application",
        "info",
        "Look for another XID or a killed process just before it; alone it needs nothing.",
    ),
    Xid(
        69,
        "Invalid class or method",
        "A program used a function of the graphics or compute engine that is not there.",
        "application",
        "warning",
        _DEBUG + _OTHER_GPU,
    ),
    Xid(
        80,
        "Commands failed their checksum",
        "What was sent to the GPU was not what arrived.",
        "system",
        "warning",
        "Restart the job. If it comes again, look at the PCIe error counters and test the host's "
        "memory.",
    ),
    Xid(
        141,
        "Error in a fast path of CUDA",
        "A short cut between CUDA and the GPU failed for one program.",
        "driver",
        "warning",
        "Restart the job; if it comes again, update the driver.",
    ),
)

_DRIVER = (
    Xid(
        37,
        "Firmware met an unknown method",
        "The firmware that schedules the graphics engine was asked for something it does not have.",
        "driver",
        "warning",
        "Check that the versions of CUDA and driver fit; update the driver.",
    ),
    Xid(
        38,
        "Firmware watchdog",
        "The firmware that schedules the graphics engine did not answer in time.",
        "driver",
        "warning",
        "Update the driver. If the GPU stays unusable, reset it.",
    ),
    Xid(
        44,
        "Fault while switching contexts",
        "The graphics engine failed between the work of two programs.",
        "driver",
        "warning",
        "Restart the job. If it comes again, reset the GPU and update the driver.",
    ),
    Xid(
        46,
        "GPU does not answer",
        "The driver waited for the GPU in vain.",
        "unknown",
        "critical",
        "Drain the GPU and reset it; if it comes back, have the GPU tested.",
    ),
    Xid(
        60,
        "Error of the security processor's engine",
        "An engine for protected video or encryption failed.",
        "driver",
        "warning",
        "Restart the job; if it comes again, update the driver.",
    ),
    Xid(
        66,
        "Illegal register access by the driver",
        "The driver's firmware stopped an access to a register that is not allowed.",
        "driver",
        "warning",
        "Update the driver; report it if the newest one does it too.",
    ),
    Xid(
        67,
        "Illegal access by the driver",
        "The driver's firmware found a request that breaks its rules.",
        "driver",
        "warning",
        "Update the driver; report it if the newest one does it too.",
    ),
    Xid(
        78,
        "vGPU did not start",
        "A virtual GPU could not be started, mostly because host and guest drivers do not fit.",
        "driver",
        "warning",
        "Bring the drivers of host and guest to versions that are supported together.",
    ),
    Xid(
        81,
        "VGA subsystem error",
        "The part that drives a text console or an old display mode failed.",
        "hardware",
        "warning",
        "Use no display on this GPU; if it comes again, have the GPU tested.",
    ),
    Xid(
        106,
        "Test message of the management bus",
        "Somebody tested the reporting of errors to the baseboard controller.",
        "system",
        "info",
        "Nothing.",
    ),
    Xid(
        109,
        "Context switch timed out",
        "Work could not be taken off the GPU in time to let other work run.",
        "unknown",
        "critical",
        "Restart the job and reset the GPU. If one program brings it about again and again, look "
        "at that program; else update the driver.",
    ),
    Xid(
        119,
        "GSP does not answer",
        "The GPU's system processor, which runs most of the driver, did not answer a request in "
        "time. The GPU cannot be used.",
        "driver",
        "critical",
        "Drain the GPU and reset it, or reboot. If it comes again, update driver and firmware, "
        "and have the GPU tested.",
    ),
    Xid(
        120,
        "GSP failed",
        "The GPU's system processor, which runs most of the driver, met an error.",
        "driver",
        "critical",
        "Drain the GPU and reset it, or reboot. If it comes again, update driver and firmware, "
        "and have the GPU tested.",
    ),
    Xid(
        151,
        "Key rotation failed",
        "In confidential computing the keys of a channel could not be renewed.",
        "driver",
        "critical",
        "Restart the virtual machine; if it comes again, update the driver.",
    ),
    Xid(
        158,
        "GPU timed out for good",
        "The GPU stopped answering and the driver gave it up.",
        "unknown",
        "critical",
        "Drain the GPU and reset it; if it comes back, have the GPU tested.",
    ),
)

_ENGINES = (
    *(_engine(number, "Copy engine", "moves data") for number in _COPIES),
    *(_engine(number, "Video decoder", "decodes video") for number in _DECODERS),
    *(_engine(number, "Video encoder", "encodes video") for number in _ENCODERS),
    *(_engine(number, "JPEG engine", "decodes JPEG images") for number in _JPEG),
    *(_engine(number, "Optical flow engine", "computes motion") for number in _OPTICAL_FLOW),
)

SOFTWARE_XIDS = _PROGRAMS + _DRIVER + _ENGINES

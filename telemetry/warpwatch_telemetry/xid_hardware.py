"""XIDs of the GPU's memory, links, controllers and power."""

from __future__ import annotations

from warpwatch_telemetry.xid import Severity, Xid

_TEST = "Drain the GPU, reset it, and run `dcgmi diag -r 3`; replace it if it fails"
_LINK = (
    "Follow the recovery action of XID 154 if there is one, else drain and reset the GPU. If it "
    "comes again, look at both ends of the link: GPU, baseboard or cable, switch."
)

_MEMORY = (
    Xid(
        48,
        "Uncorrectable memory error",
        "ECC found more wrong bits than it can put right; the programs that used them were ended.",
        "hardware",
        "critical",
        "Drain the GPU and reset it, so that the row is remapped or the page retired. With a "
        "failed remapping, or soon again, replace it.",
    ),
    Xid(
        63,
        "Row remapped or page retired",
        "A bad place in memory was noted to be taken out of use (rows since Ampere, pages before).",
        "hardware",
        "warning",
        "Reset the GPU when its work is done; until then the change is pending.",
    ),
    Xid(
        64,
        "Remapping or retiring failed",
        "A bad place in memory could not be taken out of use: no spare is left, or it could not "
        "be noted.",
        "hardware",
        "critical",
        "Drain the GPU and reset it. If the failure stays set, replace the GPU.",
    ),
    Xid(
        92,
        "Many correctable memory errors",
        "ECC puts single wrong bits right at a high rate.",
        "hardware",
        "warning",
        "The data is right. Watch the counters; have the GPU tested if the rate stays.",
    ),
    Xid(
        94,
        "Memory error, contained",
        "An uncorrectable memory error hit one program only, which was ended; others went on.",
        "hardware",
        "critical",
        "Restart that job. Reset the GPU when its work is done; replace it if this repeats.",
    ),
    Xid(
        95,
        "Memory error, not contained",
        "An uncorrectable memory error may have reached every program on the GPU.",
        "hardware",
        "critical",
        "Trust no result of this GPU. Drain it and reset it now; replace it if this repeats.",
    ),
    Xid(
        140,
        "Unrecovered ECC error",
        "An uncorrectable error was found that no other handling took care of.",
        "hardware",
        "critical",
        _TEST + ".",
    ),
    Xid(
        156,
        "Resource retired",
        "A faulty part of the GPU was noted to be taken out of use.",
        "hardware",
        "warning",
        "Reset the GPU when its work is done.",
    ),
    Xid(
        157,
        "Retiring a resource failed",
        "A faulty part of the GPU could not be taken out of use.",
        "hardware",
        "critical",
        _TEST + ".",
    ),
    Xid(
        160,
        "Memory channel retired",
        "A channel to the GPU's memory was noted to be taken out of use.",
        "hardware",
        "warning",
        "Reset the GPU when its work is done; afterwards it has less memory.",
    ),
    Xid(
        161,
        "Retiring a memory channel failed",
        "A channel to the GPU's memory could not be taken out of use.",
        "hardware",
        "critical",
        _TEST + ".",
    ),
    Xid(
        168,
        "Less memory than before",
        "Errors in a protected region left the GPU with a smaller memory.",
        "hardware",
        "critical",
        "Drain the GPU; have it tested and replaced.",
    ),
    Xid(
        171,
        "Uncorrectable error in DRAM",
        "Says of an XID 48 beside it that the error was in the GPU's main memory.",
        "hardware",
        "critical",
        "As for XID 48.",
    ),
    Xid(
        172,
        "Uncorrectable error in SRAM",
        "Says of an XID 48 beside it that the error was in a cache or register file, which "
        "cannot be remapped.",
        "hardware",
        "critical",
        "As for XID 48; replace the GPU if it comes again.",
    ),
)


def _nvlink(number: int, unit: str, blame_of_unit: str, severity: Severity = "critical") -> Xid:
    return Xid(
        number,
        f"NVLink error: {unit}",
        f"In an NVLink of the fifth generation, {blame_of_unit} reported an error.",
        "hardware",
        severity,
        _LINK,
    )


_LINKS = (
    Xid(
        74,
        "NVLink error",
        "A link to another GPU or a switch failed. The other end may be the faulty one: a GPU "
        "that dies takes its neighbours' links along.",
        "hardware",
        "critical",
        "Look for an XID of a neighbour or the switch first. Drain and reset the GPUs of the "
        "link; if it comes again, check seating, bridge, baseboard and fabric manager.",
    ),
    Xid(
        79,
        "GPU fell off the bus",
        "The GPU does not answer over PCIe any more: no power, a broken link, or a dead GPU.",
        "hardware",
        "critical",
        "Drain the node and power-cycle it. If it comes again, check power cables, riser, "
        "temperature and slot, then replace the GPU.",
    ),
    Xid(
        121,
        "Chip-to-chip link error",
        "The link between GPU and CPU of a superchip corrected an error or was retrained.",
        "hardware",
        "warning",
        "Work may go on. Reset the GPU when it is idle; have it looked at if it repeats.",
    ),
    Xid(
        136,
        "NVLink did not train",
        "A link did not come up.",
        "hardware",
        "critical",
        "Drain and reset the GPU; if it comes again, look at both ends of the link and its cable.",
    ),
    Xid(
        137,
        "Fault over NVLink",
        "Another GPU's access over NVLink was refused here: mostly a program that uses a peer's "
        "memory which is not mapped or was freed.",
        "application",
        "warning",
        "Restart the job and look for a bad pointer to another GPU's memory; look for a memory "
        "or link error on the peer.",
    ),
    _nvlink(144, "switch interface", "the part that takes requests to the link"),
    _nvlink(145, "receive side", "the part that handles what arrives"),
    _nvlink(146, "transport", "the part that carries requests"),
    _nvlink(147, "crossbar", "the part between link and crossbar"),
    _nvlink(148, "link control", "the part that controls the link"),
    _nvlink(149, "physical link", "the part that keeps the line up"),
    _nvlink(150, "management", "the controller that manages the links"),
    Xid(
        155,
        "NVLink taken down by software",
        "The driver or the fabric manager took a link out of use.",
        "driver",
        "critical",
        "Look in the log of the fabric manager for the reason; reset the GPU.",
    ),
    Xid(
        166,
        "Unencrypted NVLink traffic",
        "In confidential computing, data came over a link before its encryption was set up.",
        "driver",
        "critical",
        "Reset the GPUs of the link; update driver and fabric manager if it comes again.",
    ),
    Xid(
        167,
        "PCIe timed out for good",
        "A request over PCIe was never answered.",
        "hardware",
        "critical",
        "Drain the node and power-cycle it; check slot and riser if it comes again.",
    ),
)

_CONTROLLERS = (
    Xid(
        56,
        "Display engine error",
        "The engine that drives displays failed.",
        "hardware",
        "warning",
        "Use no display on this GPU; update the driver; if it comes again, have the GPU tested.",
    ),
    Xid(
        57,
        "Memory interface not trained",
        "The lines between the GPU and its memory could not be set up.",
        "hardware",
        "critical",
        _TEST + ".",
    ),
    Xid(
        58,
        "Memory interface unstable",
        "The lines between the GPU and its memory make errors.",
        "hardware",
        "critical",
        "Undo any overclocking. " + _TEST + ".",
    ),
    Xid(
        61,
        "Power controller stopped at a breakpoint",
        "The controller that looks after clocks and power met a state it did not expect.",
        "hardware",
        "warning",
        "Reset the GPU when its work is done; update the driver. Have it tested if it repeats.",
    ),
    Xid(
        62,
        "Power controller halted",
        "The controller that looks after clocks and power has stopped; the GPU cannot be used.",
        "hardware",
        "critical",
        "Drain the GPU and reset it; update driver and firmware, have it tested if it repeats.",
    ),
    Xid(
        93,
        "InfoROM written too often",
        "The store for the GPU's own records was written more often than planned.",
        "hardware",
        "info",
        "Nothing now; mention it to the vendor.",
    ),
    Xid(
        110,
        "Security fault",
        "A check of the GPU's own security failed.",
        "hardware",
        "critical",
        _TEST + ".",
    ),
    Xid(
        122,
        "Firmware store not readable",
        "The memory chip that holds the GPU's firmware and records could not be read.",
        "hardware",
        "warning",
        "Power-cycle the node; if it comes again, have the GPU replaced.",
    ),
    Xid(
        123,
        "Firmware store not writable",
        "The memory chip that holds the GPU's firmware and records could not be written.",
        "hardware",
        "warning",
        "Power-cycle the node; if it comes again, have the GPU replaced.",
    ),
    Xid(
        124,
        "Firmware store not erasable",
        "The memory chip that holds the GPU's firmware and records could not be erased.",
        "hardware",
        "warning",
        "Power-cycle the node; if it comes again, have the GPU replaced.",
    ),
    Xid(
        125,
        "InfoROM damaged",
        "The store for the GPU's own records is not consistent.",
        "hardware",
        "warning",
        "Check with `nvidia-smi -q` whether the InfoROM is valid; if not, have the GPU replaced.",
    ),
    Xid(
        143,
        "GPU could not be initialised",
        "The GPU failed while it was brought up; nothing can run on it.",
        "hardware",
        "critical",
        "Reset the GPU or power-cycle the node; if it comes again, replace the GPU.",
    ),
    Xid(
        154,
        "Recovery action changed",
        "The driver says what the GPU needs after another error: nothing, a reset, a reboot, or "
        "to be drained first.",
        "unknown",
        "warning",
        "Do what it says (warpwatch_device_recovery_action); the XID just before is the cause.",
    ),
    Xid(
        169,
        "Security controller halted",
        "The controller that guards the GPU's firmware has stopped.",
        "hardware",
        "critical",
        _TEST + ".",
    ),
)

_POWER = (
    Xid(
        54,
        "Auxiliary power not connected",
        "The GPU's own power cable is missing or delivers nothing.",
        "thermal_power",
        "critical",
        "Plug the power cable in; check the power supply.",
    ),
    Xid(
        162,
        "Power smoothing on again",
        "The circuit that smooths the GPU's power draw works again.",
        "thermal_power",
        "info",
        "Nothing.",
    ),
    Xid(
        163,
        "Power smoothing off",
        "The circuit that smooths the GPU's power draw was switched off.",
        "thermal_power",
        "warning",
        "Check power and temperature of the GPU.",
    ),
    Xid(
        164,
        "Power smoothing near its end of life",
        "The circuit that smooths the GPU's power draw is nearly worn out.",
        "thermal_power",
        "warning",
        "Plan to have the GPU replaced if the site depends on smooth power draw.",
    ),
    Xid(
        165,
        "Power smoothing worn out",
        "The circuit that smooths the GPU's power draw has reached its end of life.",
        "thermal_power",
        "warning",
        "Have the GPU replaced if the site depends on smooth power draw.",
    ),
)

HARDWARE_XIDS = _MEMORY + _LINKS + _CONTROLLERS + _POWER

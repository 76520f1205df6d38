"""What settings of NCCL and its surroundings do to a training, variable by variable.

Meanings are those of NVIDIA's NCCL user guide and of PyTorch's ProcessGroupNCCL environment
variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """What the values of a process refer to. ``interfaces`` None: not known."""

    interfaces: frozenset[str] | None
    adapters: frozenset[str]


# Whether a value is worth a word where it is set.
Test = Callable[[str, NodeNetwork], bool]


@dataclass(frozen=True, slots=True)
class Variable:
    """``names``: the same setting under its names. ``ok``: False a fault, None a note."""

    names: tuple[str, ...]
    suspicious: Test
    ok: bool | None
    meaning: str
    advice: str = "unset it"


def _on(value: str, _: NodeNetwork) -> bool:
    return value.strip().lower() not in ("", "0", "false", "n", "no", "off")


def _off(value: str, _: NodeNetwork) -> bool:
    return value.strip().lower() in ("0", "false", "n", "no", "off")


def _set(value: str, _: NodeNetwork) -> bool:
    return bool(value.strip())


def _one_of(*values: str) -> Test:
    return lambda value, _: value.strip().upper() in values


def _on_with_adapters(value: str, network: NodeNetwork) -> bool:
    return bool(network.adapters) and _on(value, network)


def _on_without_adapters(value: str, network: NodeNetwork) -> bool:
    return not network.adapters and _on(value, network)


def _no_interface(value: str, network: NodeNetwork) -> bool:
    """``eth,ib`` are prefixes, ``=eth0`` exact, ``^docker`` excludes."""
    if network.interfaces is None or value.startswith("^"):
        return False
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    return not any(_fits(name, wanted, exact) for name in network.interfaces)


def _no_adapter(value: str, network: NodeNetwork) -> bool:
    """``mlx5_0:1,mlx5_1`` are prefixes with ports, ``=`` and ``^`` as for interfaces."""
    if not network.adapters or value.startswith("^"):
        return False
    exact = value.startswith("=")
    wanted = [each.partition(":")[0] for each in value.removeprefix("=").split(",")]
    return not any(_fits(name, wanted, exact) for name in network.adapters)


def _fits(name: str, wanted: list[str], exact: bool) -> bool:
    return any(name == each if exact else each and name.startswith(each) for each in wanted)


def _loopback(value: str, _: NodeNetwork) -> bool:
    return value.strip().lstrip("=") == "lo"


VARIABLES: tuple[Variable, ...] = (
    Variable(
        ("NCCL_P2P_DISABLE",),
        _on,
        False,
        "GPUs of the node copy through host memory instead of NVLink or PCIe",
    ),
    Variable(
        ("NCCL_P2P_LEVEL",),
        _one_of("LOC", "0"),
        False,
        "GPUs of the node never copy directly, as with NCCL_P2P_DISABLE",
    ),
    Variable(
        ("NCCL_SHM_DISABLE",),
        _on,
        False,
        "where GPUs cannot copy directly, ranks of one node talk through network sockets",
        "unset it; if /dev/shm was too small, enlarge that",
    ),
    Variable(
        ("NCCL_IB_DISABLE",),
        _on_with_adapters,
        False,
        "the node has InfiniBand or RoCE, and traffic between nodes goes over TCP sockets",
    ),
    Variable(
        ("NCCL_IB_DISABLE",),
        _on_without_adapters,
        None,
        "traffic between nodes goes over TCP sockets",
        "no loss while the node has no InfiniBand",
    ),
    Variable(
        ("NCCL_NET_GDR_LEVEL",),
        _one_of("LOC", "0"),
        None,
        "the network adapter never reads GPU memory directly: each message is copied to the host",
    ),
    Variable(("NCCL_NVLS_ENABLE",), _off, None, "NVSwitch does not reduce for the GPUs (NVLS)"),
    Variable(
        ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
        _no_interface,
        False,
        "no such network interface: start-up fails",
        "`ip -br link` lists them; one that all nodes have, or unset it",
    ),
    Variable(
        ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
        _loopback,
        None,
        "the loopback interface reaches this node only",
        "unset it for a job of several nodes",
    ),
    Variable(
        ("NCCL_IB_HCA",),
        _no_adapter,
        False,
        "no such InfiniBand adapter: NCCL falls back to sockets",
        "`ibv_devices` lists them",
    ),
    Variable(
        ("NCCL_DEBUG",),
        _one_of("TRACE"),
        None,
        "every call is logged, which slows training and fills disks",
        "NCCL_DEBUG=WARN, or INFO while searching for a fault",
    ),
    Variable(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        _off,
        False,
        "when one rank dies the others hang for ever instead of ending",
    ),
    Variable(
        ("TORCH_NCCL_ENABLE_MONITORING",),
        _off,
        None,
        "a process whose NCCL watchdog hangs is never ended",
    ),
    Variable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
        _on,
        None,
        "the training thread waits for each collective: nothing overlaps with it",
    ),
    Variable(
        ("CUDA_LAUNCH_BLOCKING",),
        _on,
        False,
        "each kernel launch waits for its end: training is many times slower",
        "unset it after debugging",
    ),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG",),
        _one_of("DETAIL"),
        None,
        "each collective is checked among all ranks first, which slows training",
        "unset it after debugging",
    ),
    Variable(
        ("NCCL_ALGO", "NCCL_PROTO"),
        _set,
        None,
        "fixed: NCCL no longer chooses by message size and topology",
        "unset it unless it was measured with this NCCL on these nodes",
    ),
    Variable(
        (
            "NCCL_MAX_NCHANNELS",
            "NCCL_MAX_CTAS",
            "NCCL_BUFFSIZE",
            "NCCL_NTHREADS",
            "NCCL_CROSS_NIC",
        ),
        _set,
        None,
        "fixed tuning, which may be wrong on another GPU or network",
        "unset it unless it was measured with this NCCL on these nodes",
    ),
)
NAMES = frozenset(name for variable in VARIABLES for name in variable.names)

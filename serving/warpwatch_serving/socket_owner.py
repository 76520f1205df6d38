"""Whose a TCP connection over loopback is: the UID of the process that opened it.

The kernel is asked about that one connection (sock_diag(7)). Reading /proc/net/tcp would take
milliseconds for each connection that anyone makes.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

Address = tuple[str, int]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ESTABLISHED = 1
_NO_COOKIE = b"\xff" * 8
_TIMEOUT_S = 1.0

# struct nlmsghdr: length, type, flags, sequence, pid
_HEADER = struct.Struct("=IHHII")
# struct inet_diag_req_v2: family, protocol, extensions, padding, states; then the socket's ports
# (big-endian), addresses, interface and cookie
_QUESTION = struct.Struct("=BBBBI")
_PORTS = struct.Struct(">HH")
# struct inet_diag_msg: family, state, timer, retransmissions, the socket (48 bytes), expires,
# receive queue, send queue, uid, inode
_ANSWER = struct.Struct("=BBBB48xIIIII")


def owner(client: Address, server: Address) -> int | None:
    """The UID, None where it cannot be known.

    A connection that its client has closed has no inode any more, and UID 0 although it was not
    root's: only one that is established and has an inode is believed. Raises OSError where the
    kernel answers no such questions.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        netlink.send(_question(client, server))
        answer = netlink.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return None
    _, state, *_, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return uid if state == _ESTABLISHED and inode else None


def _question(client: Address, server: Address) -> bytes:
    addresses = [ipaddress.ip_address(host).packed for host, _ in (client, server)]
    family = socket.AF_INET if len(addresses[0]) == 4 else socket.AF_INET6
    body = (
        _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
        + _PORTS.pack(client[1], server[1])
        + b"".join(packed.ljust(16, b"\0") for packed in addresses)
        + bytes(4)
        + _NO_COOKIE
    )
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body

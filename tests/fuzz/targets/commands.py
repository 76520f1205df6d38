"""Command files, as the shim reads them at a step's border."""

import os
import struct
import zlib
from pathlib import Path

from tests.fuzz.watch import Target
from warpwatch import protocol
from warpwatch.captures.recording import read_command

# The first byte of an input: the bytes of a whole file follow, or a text whose checksum is right.
FILE, TEXT = b"\0", b"\1"


def target(folder: Path) -> Target:
    fd = os.open(folder / "fuzz.cmd", os.O_RDWR | os.O_CREAT)

    def run(data: bytes) -> None:
        content = data[1:]
        if data[:1] == TEXT:
            text = content[: protocol.COMMAND_MAX_TEXT]
            crc = zlib.crc32(text, zlib.crc32(struct.pack("<Q", 7)))
            content = protocol.COMMAND.pack(protocol.COMMAND_MAGIC, 7, len(text), crc) + text
            content = content.ljust(protocol.COMMAND_SIZE, b"\0")
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        found = read_command(fd)
        command = found[1] if found else None
        if command is not None and command.kind:
            assert 0 < command.steps <= 100
            assert 0 < command.arm_timeout_s <= protocol.MAX_ARM_TIMEOUT_S

    asked = {"op": "capture", "id": "a-1", "kind": "torch", "start_step": 9, "options": ["stacks"]}
    file = protocol.encode_command(7, asked)
    text = file[protocol.COMMAND.size :].rstrip(b"\0")
    seeds = [FILE + file, TEXT + text, TEXT + b'{"op":"cancel","id":"a-1"}']
    tokens = (b'"arm_timeout_s":', b'"steps":', b"1e999", b"NaN", b"[", b"{", b"null", b"9" * 99)
    return Target(run, seeds, tokens, 1 + protocol.COMMAND_SIZE)

"""http.web_config: a file of any bytes, up to the TLS context and the hashes of passwords."""

from pathlib import Path

from tests.fuzz.targets.config import TOKENS, check_line
from tests.fuzz.watch import Target
from warpwatch_serving import web_config
from warpwatch_serving.web_config import BasicAuth
from warpwatch_telemetry.errors import UsageError

HASH = b"$2b$04$Xex9uoxw6CcXmL7CYl12geqnwljLC65zEQ5R3tga0X84FERdsX9Y6"


def target(folder: Path) -> Target:
    path = folder / "web.yaml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            config = web_config.load(path)
            if config.tls_server_config is not None:
                web_config.Tls(config.tls_server_config)
            if config.basic_auth_users:
                BasicAuth(config.basic_auth_users)
        except UsageError as error:
            check_line(error)

    for name in ("a.pem", "b.pem"):
        (folder / name).write_text("no certificate")
    tls = b"tls_server_config:\n  cert_file: a.pem\n  key_file: b.pem\n"
    more = b"  client_ca_file: c.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
    seeds = [tls, tls + more, b"basic_auth_users:\n  a: " + HASH + b"\n", b"{}", b"[1]"]
    tokens = (HASH, b"min_version: TLS13", b'"\\0"', b"../../", b"$2a$31$")
    return Target(run, seeds, TOKENS + tokens, 1024)

"""Certificates for servers of tests."""

import ssl
import subprocess
from pathlib import Path


def make_certificate(
    folder: Path,
    name: str = "tls",
    subject: str = "IP:127.0.0.1",
    days: int = 1,
    signed_by: str = "",
) -> Path:
    """Write NAME.key and NAME.crt, and return the path of the latter.

    ``days``: how long it is valid from now; if negative, it has expired. ``signed_by``: the name of
    another one; without it, it signs itself.
    """
    key, request, signed = (folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
    extensions = folder / f"{name}.extensions"
    extensions.write_text(f"subjectAltName={subject}")
    new = "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test"
    authority = f"-CA {folder / signed_by}.crt -CAkey {folder / signed_by}.key"
    by = authority if signed_by else f"-signkey {key}"
    sign = f"x509 -req -in {request} {by} -days {days} -extfile {extensions}"
    for arguments in (f"{new} -keyout {key} -out {request}", f"{sign} -out {signed}"):
        command = ["openssl", *arguments.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return signed


def server_context(certificate: Path) -> ssl.SSLContext:
    """Return what a server of a test serves the certificate with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context

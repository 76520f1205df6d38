"""Certificates for servers of tests."""

import ssl
import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "tls", subject: str = "IP:127.0.0.1") -> Path:
    """Write NAME.key and NAME.crt, which signs itself, and return the path of the latter."""
    key, request, signed = (folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
    extensions = folder / f"{name}.extensions"
    extensions.write_text(f"subjectAltName={subject}")
    new = "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test"
    sign = f"x509 -req -in {request} -signkey {key} -days 1 -extfile {extensions}"
    for arguments in (f"{new} -keyout {key} -out {request}", f"{sign} -out {signed}"):
        command = ["openssl", *arguments.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return signed


def server_context(certificate: Path) -> ssl.SSLContext:
    """Return what a server of a test serves the certificate with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context

"""Until when a certificate is good: an expired one shuts every client out without saying why."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

# An ACME client renews a month ahead, cert-manager at two thirds of the time.
SOON = timedelta(days=7)

_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_EXPLICIT_VERSION = 0xA0
_LONG_LENGTH = 0x80


def trouble(path: Path, now: datetime) -> str | None:
    """What is wrong, or will be within SOON, in one line. None also where it cannot be read."""
    try:
        end = expiry(path.read_text(encoding="ascii"))
    except (OSError, ValueError, IndexError):
        return None
    if end - now > SOON:
        return None
    when = f"{end:%Y-%m-%d %H:%M} UTC"
    if end > now:
        return f"the certificate {path} expires on {when}; renew it"
    return f"the certificate {path} expired on {when}: clients refuse it; renew it"


def expiry(pem: str) -> datetime:
    """``notAfter`` of the first certificate. Raises ValueError or IndexError for anything else.

    RFC 5280, 4.1: Certificate and TBSCertificate are sequences; before ``validity`` come an
    optional version, serial number, signature algorithm and issuer.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = pem[pem.index(begin) : pem.index(end) + len(end)]
    certificate = _content(ssl.PEM_cert_to_DER_cert(first))
    fields = _members(_content(certificate))
    skipped = 4 if fields[0][0] == _EXPLICIT_VERSION else 3
    tag, text = _members(fields[skipped][1])[1]
    if tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError("no time")
    # Two digits of a year mean 1950 to 2049 (RFC 5280, 4.1.2.5.1).
    value = text.decode("ascii")
    century = "" if tag == _GENERALIZED_TIME else "19" if value >= "50" else "20"
    return datetime.strptime(century + value, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _content(der: bytes) -> bytes:
    """Of the first element."""
    return _members(der)[0][1]


def _members(der: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of elements one after the other, by DER's lengths."""
    found = []
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & _LONG_LENGTH:
            size = length & ~_LONG_LENGTH
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        found.append((tag, der[at : at + length]))
        at += length
    return found

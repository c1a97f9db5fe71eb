"""Why a TLS connection could not be made, and what to do."""

from __future__ import annotations

import asyncio
import ssl

_PROBE_S = 2.0
"""Seconds for a server that did not speak TLS to answer without it."""

_NAME = "use a name that it was issued for as the host of the URL"
_TO_DO = {
    9: "correct the clock of this machine, or have another certificate issued",
    10: "have it renewed, or correct the clock of this machine",
    62: _NAME,
    64: _NAME,
}
"""By OpenSSL's number of the reason: X509_V_ERR_* in openssl/x509_vfy.h."""
_TRUST = (
    "if you trust it, install its authority's certificate on this machine "
    "(update-ca-certificates), or set SSL_CERT_FILE to a file that has it"
)


def is_of_tls(error: BaseException) -> bool:
    """Whether TLS is why a connection could not be made; asyncio gives a closed one no number."""
    is_closed = isinstance(error, ConnectionResetError) and error.errno is None
    return is_closed or isinstance(error, ssl.SSLError)


async def describe_failure(error: BaseException, host: str, port: int | None) -> str:
    """What failed between this machine and `host`, and the remedy.

    If `port` did not answer by TLS, it is asked once by HTTP without TLS, and without any key; None
    asks nothing.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _of_the_certificate(error, host)
    if port is not None and await _speaks_http(host, port):
        return f"{host}:{port} speaks HTTP without TLS: begin its URL with http://, not https://"
    if not isinstance(error, ssl.SSLError):
        return (
            "the server closed the connection at the beginning of TLS: check host and port of the "
            "URL; it may not speak TLS, or only versions older than 1.2, which this machine refuses"
        )
    if "ALERT" in (error.reason or ""):
        return f"the server refused TLS ({error.reason}): it may want another version of it"
    return (
        f"what answered does not speak TLS ({error.reason or error}): check host and port of the "
        "URL, and any proxy between"
    )


def _of_the_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    said, todo = error.verify_message.rstrip("."), _TO_DO.get(error.verify_code, _TRUST)
    return f"the TLS certificate of {host} is not accepted ({said}): {todo}"


async def _speaks_http(host: str, port: int) -> bool:
    """Whether a server answers a request that is not encrypted."""
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                probe = f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                writer.write(probe.encode())
                return (await reader.read(5)).startswith(b"HTTP/")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False

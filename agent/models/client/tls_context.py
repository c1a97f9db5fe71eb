"""The TLS context of connections to endpoints, which trusts the authorities of this machine."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path

import truststore


def make_tls_context() -> ssl.SSLContext:
    """Make a context that reads the certificates of authorities when it is first used."""
    if sys.platform == "linux" and ssl.get_default_verify_paths().cafile:
        return _FileContext(ssl.PROTOCOL_TLS_CLIENT)
    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _FileContext(ssl.SSLContext):
    """Trusts OpenSSL's file of authorities, which it reads once, and again if it has changed.

    A context of truststore reads the file for each connection. That takes more than 20 ms of CPU.
    """

    _read_version: tuple[str | None, int] | None = None
    """The path and the time of change of the file that was read last; None: none was."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """See `ssl.SSLContext`."""
        file = ssl.get_default_verify_paths().cafile
        version = file, Path(file).stat().st_mtime_ns if file else 0
        if version != self._read_version:
            self.set_default_verify_paths()
            self._read_version = version
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

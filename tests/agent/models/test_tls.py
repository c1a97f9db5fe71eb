"""Failures of TLS: each says what failed and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.messages.message import Message
from agent.models.client.endpoint import EndpointModel
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, Request

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Issued(NamedTuple):
    """A certificate with its key, in a file."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    file: Path


def issue(
    directory: Path,
    host: str = "localhost",
    by: Issued | None = None,
    days: tuple[int, int] = (-1, 1),
) -> Issued:
    """Issue a certificate for `host`, by itself without `by`, valid between two days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    begins, ends = (now + datetime.timedelta(days=count) for count in days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(by.name if by else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .sign(by.key if by else key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    file = directory / f"{x509.random_serial_number()}.pem"
    file.write_bytes(certificate.public_bytes(encoding) + key.private_bytes(encoding, form, plain))
    return Issued(name, key, file)


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()


def saying(text: bytes) -> Handler:
    """A server that answers anything with this text."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(text)
        writer.close()

    return handle


async def failure_at(handler: Handler, certificate: Issued | None = None) -> ModelError:
    """How a call to such a server fails."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.file)
    server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    settings = ModelSettings(
        name="m", api="openai_chat", base_url=f"https://localhost:{port}/v1", key_env=None
    )
    model = EndpointModel(settings, "sk-secret")
    try:
        with pytest.raises(ModelError) as caught:
            await model.complete(Request([Message(role="user", content="Go.")]))
    finally:
        await model.close()
        server.close()
    return caught.value


def test_each_fault_of_a_certificate_has_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = issue(tmp_path, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    unknown = issue(tmp_path, "unknown")
    faults = {
        "expired": (issue(tmp_path, by=authority, days=(-3, -1)), "renewed"),
        "not yet valid": (issue(tmp_path, by=authority, days=(1, 3)), "clock"),
        "not valid for 'localhost'": (issue(tmp_path, "other.test", by=authority), "use a name"),
        "self-signed": (issue(tmp_path), "SSL_CERT_FILE"),
        "local issuer": (issue(tmp_path, by=unknown), "SSL_CERT_FILE"),
    }
    for fault, (certificate, remedy) in faults.items():
        error = asyncio.run(failure_at(close_at_once, certificate))
        assert "the TLS certificate of localhost is not accepted" in str(error)
        assert fault in str(error)
        assert remedy in str(error)
        assert (error.kind, error.is_lasting, error.may_have_cost) == ("connection", True, False)


def test_a_certificate_that_is_trusted_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = issue(tmp_path, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    reply = b"HTTP/1.1 418 Odd\r\nContent-Length: 0\r\n\r\n"
    error = asyncio.run(failure_at(saying(reply), issue(tmp_path, by=authority)))
    assert str(error).startswith("HTTP 418")


async def status_at(model: EndpointModel) -> str:
    """How a call to a server that answers with an odd status fails."""
    with pytest.raises(ModelError) as caught:
        await model.complete(Request([Message(role="user", content="Go.")]))
    return str(caught.value)


@contextlib.asynccontextmanager
async def odd_server(certificate: Issued) -> AsyncIterator[EndpointModel]:
    """A model at a server with this certificate, which closes each connection after a reply."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file)
    reply = b"HTTP/1.1 418 Odd\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    server = await asyncio.start_server(saying(reply), "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"
    model = EndpointModel(
        ModelSettings(name="m", api="openai_chat", base_url=url, key_env=None), "sk-secret"
    )
    try:
        yield model
    finally:
        await model.close()
        server.close()


def test_trusted_authorities_are_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them takes 20 ms of CPU, which each of a thousand connections would take."""
    authority, other = issue(tmp_path, "authority"), issue(tmp_path, "other")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.file.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))

    async def run() -> list[str]:
        async with odd_server(issue(tmp_path, by=authority)) as model:
            errors = [await status_at(model)]
            changed_at = trusted.stat().st_mtime_ns
            trusted.write_bytes(authority.file.read_bytes())
            os.utime(trusted, ns=(changed_at, changed_at))
            errors.append(await status_at(model))
            os.utime(trusted, ns=(changed_at, changed_at + 1))
            return [*errors, await status_at(model)]

    before, unread, after = asyncio.run(run())
    assert "local issuer" in before
    assert "local issuer" in unread
    assert after.startswith("HTTP 418")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (
            saying(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
            "begin its URL with http:",
        ),
        (saying(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak TLS"),
        (close_at_once, "closed the connection at the beginning of TLS"),
    ],
)
def test_what_does_not_speak_tls_is_told_apart(handler: Handler, message: str) -> None:
    error = asyncio.run(failure_at(handler))
    assert message in str(error)
    assert (error.kind, error.may_have_cost) == ("connection", False)

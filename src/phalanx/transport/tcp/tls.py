"""TLS 1.3 between hosts, which the handshake agrees on (`wire/handshake.py`), over one socket.

    PHALANX_TLS             on: where both sides have it, or neither has (the default)
                            off: never; require: a process that cannot speak it does not start
    PHALANX_TLS_CERT, _KEY  a certificate and its key of one's own, PEM files, and
    PHALANX_TLS_CA          who has issued those of all ranks

Otherwise each process makes a certificate of its own with the package `cryptography`, when it is
first called from another host, or calls one. All of a job have one issuer, whose key follows from
the token: so OpenSSL lets nobody in who does not hold it, before the fingerprints are compared.
Nothing depends on names, or on the time of day.

Inside a host, and without a token, which lets in this host alone, nothing is encrypted.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import hmac
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer, override

from phalanx.errors import AuthenticationError, BackendUnavailableError, MisuseError
from phalanx.transport.tcp.admission import read_own
from phalanx.wire.control import is_loopback
from phalanx.wire.handshake import PLAIN_TEXT, AcceptorHandshake, Handshake, Offer, Stance

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

VARIABLE = "PHALANX_TLS"
INSTALL = "pip install 'phalanx[tls]'"
AT_ONCE = 64 << 10  # bytes that are encrypted at a time; four of TLS's records
READ_AT_ONCE = 1 << 20  # bytes that one read decrypts at most, so that others get their turn
JOINED = 4 << 10  # bytes of a frame's beginning that are sent in one record with what follows
LONGEST_FILE = 256 << 10
_WELL_KNOWN = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)
_PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def on_other_host(sock: socket.socket) -> bool:
    """Return whether the two ends of a connection have different addresses."""
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # it is broken, which is noticed later
        return False
    return here != there and not (is_loopback(here) and is_loopback(there))


class Tls:
    """The TLS of a rank, of a server of the launcher or of its caller; with one certificate.

    apart   whether a connection leads to another host
    able    whether there is the package `cryptography`

    Raises `MisuseError` (the variables make no sense), `BackendUnavailableError` (TLS is required,
    and there is none), `AuthenticationError` (a file cannot be read, or is not what it should be).
    """

    def __init__(
        self,
        token: bytes,
        environ: Mapping[str, str] = os.environ,
        *,
        apart: Callable[[socket.socket], bool] = on_other_host,
        able: bool | None = None,
    ) -> None:
        self.apart = apart
        self._token = token
        self._own = {name: environ.get(f"{VARIABLE}_{name}", "") for name in ("CERT", "KEY", "CA")}
        mode = environ.get(VARIABLE, "on")
        if mode not in ("on", "off", "require"):
            raise MisuseError(f"{VARIABLE} is on, off or require, not {mode!r}")
        if any(self._own.values()) and not all(self._own.values()):
            raise MisuseError(f"{VARIABLE}_CERT, _KEY and _CA are given together, or none of them")
        self.stance = Stance.OFF
        if token and mode != "off":
            can = find_spec("cryptography") is not None if able is None else able
            can = can or bool(self._own["CERT"])
            self.stance = Stance.ABLE if can else Stance.CANNOT
            if mode == "require" and not can:
                raise BackendUnavailableError(
                    f"{VARIABLE}=require, and this process cannot speak TLS: {INSTALL}"
                )
            if self._own["CERT"]:
                self._contexts  # noqa: B018 - errors shall be known now
        # One for all connections: of an unauthenticated one each byte counts.
        self._offers = [Offer(self.stance, apart, self._fingerprint) for apart in (False, True)]

    def offer(self, sock: socket.socket) -> Offer:
        """Return this side's offer of TLS on that connection."""
        return self._offers[self.apart(sock)]

    def wrap(self, sock: socket.socket, handshake: Handshake) -> TlsSocket:
        """Return the socket, within TLS, which begins when it is used. Raises `Refused`, OSError"""
        first, server = handshake.enter_tls(), isinstance(handshake, AcceptorHandshake)
        # Or the kernel would wait 40 ms with the second of two small words in a row.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrapped = self._contexts[server].wrap_socket(
            sock, server_side=server, do_handshake_on_connect=False
        )
        assert isinstance(wrapped, TlsSocket)
        wrapped.first, wrapped.due = first, handshake.fingerprint
        return wrapped

    def is_readable(self, sock: socket.socket) -> bool:
        """Return whether, for want of TLS, others can read the bytes to another host."""
        readable = not isinstance(sock, TlsSocket) and self.stance is Stance.CANNOT
        return readable and self.apart(sock)

    def _fingerprint(self) -> bytes:
        found = _PEM.search(self._credentials[0])
        if found is None:
            raise AuthenticationError(f"{self._own['CERT']} ({VARIABLE}_CERT) has no certificate")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).digest()

    @cached_property
    def _credentials(self) -> tuple[str, str, str]:
        """Return a certificate, its key, and the issuer's certificate, in PEM."""
        if not self._own["CERT"]:
            return _make(self._token)
        cert, key, issuer = (
            read_own(
                path,
                "key" if name == "KEY" else "certificate",
                f"{VARIABLE}_{name}",
                remedy=f"chmod 600 {path}" if name == "KEY" else "give it in PEM",
                most=LONGEST_FILE,
                secret=name == "KEY",
            )
            for name, path in self._own.items()
        )
        return cert, key, issuer

    @cached_property
    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts of a client, and of a server."""
        cert, key, issuer = self._credentials
        try:
            # OpenSSL reads files. This one has no name.
            memory = getattr(os, "memfd_create", None)
            with open(memory(VARIABLE), "wb") if memory else tempfile.TemporaryFile() as file:
                file.write(f"{cert}\n{key}\n".encode())
                file.flush()
                name = f"/dev/fd/{file.fileno()}"
                client, server = (
                    _context(kind, name, issuer)
                    for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
                )
        except (ValueError, ssl.SSLError) as error:
            raise AuthenticationError(
                f"{VARIABLE}_CERT, _KEY and _CA ({', '.join(self._own.values())}) are not a "
                f"certificate, its key and its issuer's certificate, in PEM: {error}"
            ) from None
        return client, server


def _context(kind: int, name: str, issuer: str) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # if the kernel can; Python 3.12
    context.sslsocket_class = TlsSocket
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.load_verify_locations(cadata=issuer)
    context.load_cert_chain(name, password="")  # rather than ask for one
    return context


def _make(token: bytes) -> tuple[str, str, str]:
    """Return a new certificate, its key, and the certificate of the token's issuer, in PEM."""
    from cryptography import x509  # noqa: PLC0415 - an extra, and an import that takes 0.1 s
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    pem = serialization.Encoding.PEM
    secret = hmac.digest(token, b"phalanx issuer", "sha512")  # reduced, it is as good as uniform
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
    issuer = ec.derive_private_key(int.from_bytes(secret, "big") % (order - 1) + 1, ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    issuers_name, name = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
        for text in ("phalanx token", "phalanx process")
    )

    def certificate(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> Certificate:
        builder = x509.CertificateBuilder(
            issuers_name, subject, public, x509.random_serial_number(), *_WELL_KNOWN
        )
        ca = x509.BasicConstraints(ca=subject is issuers_name, path_length=None)
        return builder.add_extension(ca, critical=True).sign(issuer, hashes.SHA256())

    mine, issuers = (
        certificate(name, key.public_key()),
        certificate(issuers_name, issuer.public_key()),
    )
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return mine.public_bytes(pem).decode(), private.decode(), issuers.public_bytes(pem).decode()


class TlsSocket(ssl.SSLSocket):
    """A socket within TLS: users of it need not know. `Tls.wrap` makes it.

    TLS begins with the first use; the peer's certificate is compared before anything is said. A
    read or write that would wait raises `BlockingIOError`, and damage OSError (EBADMSG), with
    words. Beside what a socket can,

    first    is said as soon as TLS stands
    due      the SHA-256 of the certificate that the peer has to show
    read_waits   a read has something to send first, such as new keys, and waits for the kernel

    OpenSSL keeps encrypted bytes that the kernel has not taken, and insists on the same bytes the
    next time. So these are kept, and all but the last of them count as sent: the sender goes on
    with that one, sooner or later, and until then its message is not complete.
    """

    first = due = b""
    read_waits = False
    _stands = False
    _kept = b""
    _owed = 0  # bytes at the beginning of what is sent next that OpenSSL has already

    @override
    def send(self, data: Buffer, flags: int = 0) -> int:
        if self._kept:
            self._do(super().send, self._kept)
            self._kept = b""
        owed, chunk = self._owed, memoryview(data)[self._owed : AT_ONCE]
        try:
            if len(chunk):
                self._do(super().send, chunk)
        except BlockingIOError:
            if not self._stands:
                raise
            self._kept, self._owed = bytes(chunk), 1
            if owed + len(chunk) == 1:
                raise
            return owed + len(chunk) - 1
        self._owed = 0
        return owed + len(chunk)

    @override
    def sendmsg(self, buffers: Iterable[Buffer], *_: object) -> int:  # type: ignore[override]
        first, *rest = buffers
        view = memoryview(first)
        if len(view) < JOINED and rest:
            return self.send(b"".join((view, memoryview(rest[0])[: AT_ONCE - len(view)])))
        return self.send(view)

    @override
    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        return self._do(self.read, buflen) or b""

    @override
    def recv_into(self, buffer: Buffer | None, nbytes: int | None = None, flags: int = 0) -> int:
        view = memoryview(buffer or b"")[: nbytes or READ_AT_ONCE]
        count: int = self._do(self.read, len(view), view)
        more = count
        while more and count < len(view) and self.gettimeout() == 0.0:
            try:
                more = self._do(self.read, len(view) - count, view[count:])
            except BlockingIOError:
                break
            count += more
        return count

    def _do(self, what: Callable[..., Any], *args: object) -> Any:
        """Do that within TLS, which begins first; return 0 at the end of the peer's bytes."""
        self.read_waits = False
        try:
            if not self._stands:
                self._begin()
            return what(*args)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            self.read_waits = what == self.read and isinstance(error, ssl.SSLWantWriteError)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            if what != self.read:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
            return 0
        except ssl.SSLError as error:
            raise OSError(errno.EBADMSG, _words(error, stands=self._stands)) from None

    def _begin(self) -> None:
        self.do_handshake()
        shown = self.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(shown).digest(), self.due):
            raise OSError(
                errno.EBADMSG, "its certificate is not the one that it proved: who is between?"
            )
        self._stands = True
        if self.first:
            super().send(self.first)


def _words(error: ssl.SSLError, *, stands: bool) -> str:
    """Describe the error of the peer, such as "its bytes were changed"."""
    what = (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not hold: {error.verify_message} ({VARIABLE}_CA)"
    if "alert" in what:
        return f"it ended TLS ({what})"
    if not stands and what in ("wrong version number", "http request", "packet length too long"):
        return PLAIN_TEXT
    return f"its bytes were changed on the way (TLS: {what})"

"""Keys by which processes of a run authenticate: certificates of its authority.

A key file has the private key and the certificate of a process, and the certificate of
the run's authority. One file may be copied to all processes. A process may also have a
key of its own, with its own name, by which the key can be revoked. The authority's
private key stays beside the first key file, where the run was created. The ``openssl``
command makes certificates; their use needs only Python.

Anyone who can read a key can join the run and change its result. So a key file that
other users can read is refused, as in ssh.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from whalejax.meshes.errors import WhaleError, visible


AUTHORITY: Final = ".authority"
"""Suffix of the file with the authority's private key."""

REVOKED: Final = ".revoked"
"""Suffix of the file that lists the names of revoked certificates."""

EVERYONE: Final = "everyone"
"""Name in the certificate of the first file."""

DAYS: Final = 730
"""Number of days for which a certificate is valid."""

_DAY_SECONDS: Final = 86_400
_MOST_BYTES: Final = 1 << 16
_SECONDS: Final = 60.0
_NAME: Final = re.compile(r"[\w.-]{1,60}", re.ASCII)
_BLOCK: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL
)

_OPENSSL: Final = """
[req]
distinguished_name = subject
prompt = no
[subject]
CN = x
[ca]
default_ca = run
[run]
database = index
new_certs_dir = .
default_md = sha256
policy = names
rand_serial = yes
unique_subject = no
[names]
CN = supplied
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[process]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""

_OTHER_RUN: Final = "its key and that of this process are of different runs"
_ISSUE: Final = "python -m whalejax.wire.keys issue"
_EXPIRED: Final = 10
_NOT_YET: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Key:
    """Certificate of a process, and the authority by which it accepts others.

    Attributes:
        path: Path of the key file.
        name: Name in the certificate.
        run: Name of the authority.
        accepts, dials: TLS 1.3 contexts to accept and to make connections. Both require
            a certificate of the same authority.
    """

    path: Path
    name: str
    run: str
    accepts: ssl.SSLContext
    dials: ssl.SSLContext
    _revoked: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    def refusal(self, name: str) -> str:
        """Returns why a process is not accepted; empty if it is.

        Args:
            name: Name in the process's certificate, which the authority has signed.
        """
        if name not in self.revoked():
            return ""
        return (
            f"the certificate of {visible(name)!r} was revoked. Make that process "
            f"another key, under another name: {_ISSUE}"
        )

    def revoked(self) -> frozenset[str]:
        """Returns the names of revoked certificates, from the current list."""
        path = _sibling_path(self.path, REVOKED)
        try:
            changed_at = path.stat().st_mtime
        except OSError:
            return frozenset()
        if not self._revoked or self._revoked[0][0] != changed_at:
            with contextlib.suppress(OSError):
                result = changed_at, frozenset(path.read_text().split())
                self._revoked[:] = [result]
        return self._revoked[0][1] if self._revoked else frozenset()


def make_key(path: Path) -> None:
    """Creates an authority and its first key, unless the file exists.

    Args:
        path: Path of the key file. The authority's private key is written beside it.
            Only the owner can read either file.

    Raises:
        WhaleError: The key cannot be written, or ``openssl`` is missing or fails.
    """
    if path.exists():
        return
    with _draft_folder(path) as folder:
        run = f"whalejax run {secrets.token_hex(8)}"
        _certify(folder, run, "authority", 10 * DAYS)
        own = [(folder / f"authority.{kind}").read_bytes() for kind in ("key", "pem")]
        _publish(_sibling_path(path, AUTHORITY), b"".join(own))
        _publish(path, _issued(folder, EVERYONE, DAYS))


def issue_key(path: Path, name: str, to: Path, *, days: float = DAYS) -> None:
    """Writes a separate key for one process of a run.

    Args:
        path: Path of the run's first key file, beside which its authority is stored.
        name: Name in the certificate, by which it can be revoked.
        to: Path of the file to write.
        days: Number of days for which the certificate is valid.

    Raises:
        WhaleError: The name is invalid, the file exists, the authority is missing, or
            the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise WhaleError(
            f"the name of a key is {visible(name)[:80]!r}; expected at most 60 "
            "letters, digits, dots, dashes and underscores"
        )
    if to.exists():
        raise WhaleError(f"{to} exists already. Name another file")
    data = _read(_sibling_path(path, AUTHORITY), "the authority of the run")
    with _draft_folder(to) as folder:
        for kind in ("key", "pem"):
            (folder / f"authority.{kind}").write_bytes(data)
        _publish(to, _issued(folder, name, days))


def revoke_key(path: Path, name: str) -> None:
    """Revokes all certificates with a name.

    Args:
        path: Path of a key file of the run. Processes that use this path refuse the
            certificates.
        name: Name in the certificates.

    Raises:
        WhaleError: The list cannot be written.
    """
    revoked = _sibling_path(path, REVOKED)
    with _draft_folder(revoked):
        before = revoked.read_text() if revoked.exists() else ""
        draft = revoked.with_name(f".{revoked.name}.{os.getpid()}")
        draft.write_text(f"{before}{name}\n")
        draft.chmod(0o600)
        draft.replace(revoked)


def load_key(path: Path) -> Key:
    """Loads a key file, and tests the key in a handshake with itself.

    Raises:
        WhaleError: The file cannot be read, other users can read it, or no process of
            the run would accept the key.
    """
    data = _read(path, "the key of the run")
    if b"-----BEGIN" not in data:
        raise WhaleError(
            f"{path} holds no certificate: it is no key, or one of a whalejax that "
            "signed its messages and did not encrypt them. Remove it and begin the run "
            "anew, which makes another, and copy that one to the other machines"
        )
    blocks = _BLOCK.findall(data)
    try:
        authority = blocks[-1].decode()
        accepts, dials = (_context(path, authority, server=x) for x in (True, False))
        certificate = _tried(accepts, dials)
    except (ssl.SSLError, IndexError, ValueError) as error:
        first = visible(data.partition(b"\n")[0].decode("ascii", "replace"))[:200]
        raise WhaleError(f"{path}: {_own_fault(error)} (it says: {first})") from None
    return Key(
        path=path,
        name=_common_name(certificate, "subject"),
        run=_common_name(certificate, "issuer"),
        accepts=accepts,
        dials=dials,
    )


# Refusal of others.


def certificate_refusal(error: ssl.SSLError) -> str:
    """Returns the fault of a certificate that made a handshake fail, or an empty text.

    Args:
        error: Error of the handshake, on this side or reported by the other side.
    """
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return f"its certificate has expired. Give it another key: {_ISSUE}"
        if error.verify_code == _NOT_YET:
            return "its certificate is not valid yet. Set the clocks of both machines"
        return _OTHER_RUN
    if "CERTIFICATE_EXPIRED" in reason:
        return (
            "it refused the key of this process, whose certificate has expired. Give "
            f"it another: {_ISSUE}"
        )
    is_of_another = "UNKNOWN_CA" in reason or "CERT" in reason
    return _OTHER_RUN if "ALERT" in reason and is_of_another else ""


def _own_fault(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return (
                "its certificate has expired. Make another where the run was begun: "
                f"{_ISSUE}; or remove the file and begin the run anew"
            )
        if error.verify_code == _NOT_YET:
            return "its certificate is not valid yet. Set the clock of this machine"
        return "its certificate is not of the authority in it. Copy the file anew"
    return (
        "it holds no private key with its certificate and that of the authority. Copy "
        "the file anew"
    )


def peer_name(link: ssl.SSLSocket) -> str:
    """Returns the name in the other side's certificate, after the handshake."""
    return _common_name(link.getpeercert() or {}, "subject")


def _common_name(certificate: Any, which: str) -> str:
    for parts in certificate.get(which, ()):
        for name, value in parts:
            if name == "commonName":
                return str(value)
    return ""


def _tried(server: ssl.SSLContext, client: ssl.SSLContext) -> Any:
    """Returns the certificate from a handshake of a key with itself."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in (*ends, *ends):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[1].getpeercert()


def _context(path: Path, authority: str, *, server: bool) -> ssl.SSLContext:
    side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.check_hostname = False  # Any process with a run's key may connect.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    context.load_cert_chain(path)
    if server:
        context.num_tickets = 0
    return context


# Files.


def _sibling_path(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            result = os.fstat(file.fileno())
            if not stat.S_ISREG(result.st_mode):
                raise WhaleError(f"{path} is no regular file; expected a key file")
            _check_owner(path, result)
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise WhaleError(
            f"{path}: {what} cannot be read ({error.strerror or error}). "
            "Name the key file of the run: elastic/key in the folder of an elastic "
            "run, swarm.key of a swarm"
        ) from error


def _check_owner(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise WhaleError(
            f"{path} has mode {mode:o}, so that others can read the key of the run or "
            f"write it; expected 600. Run chmod 600 {path}"
        )
    if found.st_uid != os.geteuid():
        raise WhaleError(
            f"{path} belongs to user {found.st_uid}; this process runs as user "
            f"{os.geteuid()}. Copy the key into a file of your own with mode 600"
        )


@contextlib.contextmanager
def _draft_folder(path: Path) -> Iterator[Path]:
    """Yields a folder for unfinished files; explains errors of writing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".key-") as folder:
            yield Path(folder)
    except OSError as error:
        raise WhaleError(
            f"{path}: the key of this run cannot be written "
            f"({error.strerror or error}). Give a folder that can be written"
        ) from error


def _publish(path: Path, data: bytes) -> None:
    """Writes a file atomically; only its owner can read it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(opened, "wb") as file:
        file.write(data)
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


# Certificates.


def _issued(folder: Path, name: str, days: float) -> bytes:
    _certify(folder, name, "process", days)
    until = time.strftime("%Y-%m-%d", time.gmtime(time.time() + days * _DAY_SECONDS))
    first = f"whalejax key of {name!r}, valid until {until}\n"
    names = ("process.key", "process.pem", "authority.pem")
    blocks = [(folder / name).read_bytes() for name in names]
    # The authority's file may contain its private key too, which must not be copied.
    blocks[-1] = _BLOCK.findall(blocks[-1])[-1] + b"\n"
    return first.encode() + b"".join(blocks)


def _certify(folder: Path, name: str, kind: str, days: float) -> None:
    """Creates a private key, and a certificate that the folder's authority signs."""
    (folder / "openssl.cnf").write_text(_OPENSSL)
    (folder / "index").touch()
    # Valid since yesterday, because clocks of machines differ.
    begin, end = (
        time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + n * _DAY_SECONDS))
        for n in (min(-1.0, days - 1.0), days)
    )
    new = [
        *("req", "-new", "-nodes", "-newkey", "ec"),
        *("-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={name}"),
        *("-keyout", f"{kind}.key", "-out", f"{kind}.request"),
    ]
    sign = [
        *("ca", "-batch", "-notext", "-in", f"{kind}.request", "-out", f"{kind}.pem"),
        *("-keyfile", "authority.key", "-extensions", kind),
        *("-startdate", begin, "-enddate", end),
        *(["-selfsign"] if kind == "authority" else ["-cert", "authority.pem"]),
    ]
    for command, *words in (new, sign):
        _openssl(folder, command, *words)


def _openssl(folder: Path, command: str, *words: str) -> None:
    given = ["openssl", command, "-config", "openssl.cnf", *words]
    try:
        done = subprocess.run(
            given, cwd=folder, capture_output=True, text=True, timeout=_SECONDS
        )
    except FileNotFoundError as error:
        raise WhaleError(
            "there is no command openssl here, which makes the key of a run. Install "
            "it, or make the key on another machine (python -m whalejax.wire.keys new) "
            "and copy it"
        ) from error
    except subprocess.TimeoutExpired:
        raise WhaleError(
            f"openssl {command} made no key in {_SECONDS:.0f} s. Try again when this "
            "machine has less to do, or make the key on another (python -m "
            "whalejax.wire.keys new) and copy it"
        ) from None
    if done.returncode:
        said = visible(done.stderr[-500:])
        raise WhaleError(f"openssl {command} made no key: {said}")


def main(words: list[str]) -> None:
    """Runs ``new FILE``, ``issue FILE NAME NEW_FILE`` or ``revoke FILE NAME``.

    Raises:
        WhaleError: The words have another form, or the command fails.
    """
    match words:
        case ["new", path]:
            make_key(Path(path))
        case ["issue", path, name, to]:
            issue_key(Path(path), name, Path(to))
        case ["revoke", path, name]:
            revoke_key(Path(path), name)
        case _:
            raise WhaleError(
                "expected python -m whalejax.wire.keys new FILE, issue FILE NAME "
                "NEW_FILE or revoke FILE NAME"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WhaleError as error:
        sys.exit(str(error))

"""Certificates of the server, and what they are checked for before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from specc.errors import ConfigError
from specc.server.config import Tls

_BEGIN_CERTIFICATE, _BEGIN_KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"


def make_context(files: Tls) -> ssl.SSLContext | None:
    """What connections are encrypted with; None without a certificate.

    TLS 1.2 and later, with Python's choice of ciphers; HTTP/1.1 is the only protocol on offer.

    Args:
        files: of the certificate, its key, and those that clients' certificates are checked with.
    Raises:
        ConfigError: a file cannot be read, or holds something else; the key is that of another
            certificate, or needs a passphrase; options that do nothing without others.
    """
    _check_together(files)
    if files.ssl_certfile is None:
        return None
    certificate = _read(files.ssl_certfile, "--ssl-certfile")
    if _BEGIN_CERTIFICATE not in certificate:
        raise ConfigError(
            f"--ssl-certfile {files.ssl_certfile}, which holds no certificate in PEM",
            "the server's certificate, and those that lead from it to a root",
            "name a file with a line -----BEGIN CERTIFICATE-----",
        )
    option, path = "--ssl-certfile", files.ssl_certfile
    key = certificate
    if files.ssl_keyfile is not None:
        option, path = "--ssl-keyfile", files.ssl_keyfile
        key = _read(path, option)
    if _BEGIN_KEY not in key:
        raise ConfigError(
            f"{option} {path}, which holds no private key in PEM",
            "the key that belongs to the certificate",
            "name its file: --ssl-keyfile FILE",
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.ssl_certfile, files.ssl_keyfile, _no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{option} {path}: the key of another certificate than that of"
                f" {files.ssl_certfile}",
                "a certificate and its own key, both in PEM",
                "name the key that the certificate was made with",
            ) from error
        # which of them it is, OpenSSL does not always say
        both = f"--ssl-certfile {files.ssl_certfile}"
        both += "" if files.ssl_keyfile is None else f" and --ssl-keyfile {files.ssl_keyfile}"
        raise ConfigError(
            f"{both}, which OpenSSL does not take ({error.reason or error})",
            "a certificate and its own key, both whole, in PEM and of today's strength",
            "compare them with what your authority has sent",
        ) from error
    if files.ssl_ca_certs is not None:
        _read(files.ssl_ca_certs, "--ssl-ca-certs")
        try:
            context.load_verify_locations(files.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-ca-certs {files.ssl_ca_certs}, which holds no certificates in PEM",
                "certificates of the authorities that clients have theirs from",
                "name a file with lines -----BEGIN CERTIFICATE-----",
            ) from error
    context.verify_mode = ssl.VerifyMode(files.ssl_cert_reqs)
    return context


def _check_together(files: Tls) -> None:
    given = {
        "--ssl-keyfile": files.ssl_keyfile,
        "--ssl-ca-certs": files.ssl_ca_certs,
        "--ssl-cert-reqs": files.ssl_cert_reqs or None,
    }
    alone = [name for name, value in given.items() if value is not None]
    if files.ssl_certfile is None and alone:
        raise ConfigError(
            f"{alone[0]} {given[alone[0]]} without --ssl-certfile",
            "the server's certificate",
            f"add --ssl-certfile FILE, or leave out {alone[0]}",
        )
    if files.ssl_cert_reqs and files.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {files.ssl_cert_reqs} without --ssl-ca-certs",
            "authorities that clients' certificates are checked with",
            "add --ssl-ca-certs FILE",
        )
    if files.ssl_ca_certs is not None and not files.ssl_cert_reqs:
        raise ConfigError(
            f"--ssl-ca-certs {files.ssl_ca_certs} and --ssl-cert-reqs 0, which asks no client for"
            " a certificate",
            "--ssl-cert-reqs 2, so that clients without a certificate are turned away, or 1",
            "add --ssl-cert-reqs 2, or leave out --ssl-ca-certs",
        )


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: {error.strerror}",
            "a file that this user may read",
            f"correct {option}",
        ) from error


def _no_passphrase() -> str:
    """Asked for where a key is encrypted; OpenSSL would ask at the terminal."""
    raise ConfigError(
        "a private key that needs a passphrase",
        "a key without one, in a file that only this user may read",
        "write it with: openssl pkey -in KEY -out PLAIN_KEY, and pass --ssl-keyfile PLAIN_KEY",
    )

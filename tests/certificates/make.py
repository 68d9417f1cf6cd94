"""Makes the certificates of this folder anew: `python make.py`, with the package `cryptography`.

They are for tests alone, and good until the year 2120, but for the one that has expired.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = Path(__file__).parent
BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)


def name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def key_in(path: str) -> Any:
    key = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (HERE / path).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return key


def signed(subject: str, key: Any, issuer: str, by: Any, hosts: list[Any], end: Any) -> None:
    begin = BEGIN
    made = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=subject == issuer, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False
        )
    )
    if subject == issuer:
        usage = dict.fromkeys(
            "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
            " encipher_only decipher_only".split(),
            False,
        )
        made = made.add_extension(
            x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True
        )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    data = made.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (HERE / f"{subject}.pem").write_bytes(data)


def main() -> None:
    local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    far = [x509.DNSName("node-7.example")]
    ca, other = key_in("ca.key"), key_in("other-ca.key")
    signed("ca", ca, "ca", ca, [], END)
    signed("other-ca", other, "other-ca", other, [], END)
    for subject, issuer, by, hosts, end in (
        ("server", "ca", ca, local, END),
        ("second", "ca", ca, local, END),
        ("elsewhere", "ca", ca, far, END),
        ("expired", "ca", ca, local, datetime.datetime(2021, 1, 1)),
        ("worker", "ca", ca, [], END),
        ("stranger", "other-ca", other, local, END),
    ):
        signed(subject, key_in(f"{subject}.key"), issuer, by, hosts, end)
    for path in ("ca.key", "other-ca.key"):
        (HERE / path).unlink()


if __name__ == "__main__":
    main()

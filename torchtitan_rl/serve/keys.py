"""API keys: where the server's own key comes from, and how a request's key is compared."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from torchtitan_rl.record.console.notices import say
from torchtitan_rl.serve.errors import Refused

__all__ = ["API_KEY_VARIABLE", "read_key", "bearer", "check_key", "is_loopback", "key_of"]

API_KEY_VARIABLE = "TORCHTITAN_RL_API_KEY"


def read_key(file: str, host: str, *, host_flag: str = "--host") -> str:
    """The key in `file`, else the key in the environment variable TORCHTITAN_RL_API_KEY; empty: no key is asked for.

    Raises ValueError for a file without a key, and where no key is given and `host` is not a loopback address.
    """
    if file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file={file}: cannot be read ({error}); give a file with the key") from error
        if Path(file).stat().st_mode & 0o077:
            say(
                f"warning: --api-key-file={file}: others on this machine may read or write it; chmod 600 {file}",
                event="keys",
                level="warning",
            )
        if not key:
            raise ValueError(f"--api-key-file={file}: is empty; write the key into it")
    else:
        key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if not key and not is_loopback(host):
        raise ValueError(
            f"{host_flag}={host}: other machines reach it, and no API key is given; add --api-key-file FILE, or set "
            f"{API_KEY_VARIABLE}"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(authorization: str | None) -> str:
    """The key of an `Authorization: Bearer KEY` header; empty where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def key_of(headers: Mapping[str, str]) -> str:
    """The key of a request: of `Authorization: Bearer KEY`, else of `x-api-key`, which Anthropic's clients send."""
    return bearer(headers.get("authorization")) or headers.get("x-api-key", "").strip()


def check_key(key: str, expected: str) -> None:
    """Raises Refused (401) for another key than `expected`. How long it takes does not depend on the keys' letters."""
    if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected.encode()):
        raise Refused(
            401,
            "Authorization: " + ("is not the key of this address" if key else "has no key") + "; send "
            "'Authorization: Bearer KEY' or 'x-api-key: KEY', as SDKs do with api_key",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

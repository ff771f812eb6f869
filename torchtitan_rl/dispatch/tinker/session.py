"""A session with a service that speaks Tinker's protocol, through its public SDK, and the samplers of its versions."""

from __future__ import annotations

import asyncio
import logging
import re
from importlib import import_module
from typing import Any, NoReturn

from torchtitan_rl.dispatch.role_mesh import NoAnswer, describe
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["Samplers", "answered", "not_offered", "sdk"]

_CLIENT_LOG = "tinker.lib.public_interfaces.training_client"
_FRAME = re.compile(r"Request failed: (.*?) for self\.request_id=", re.DOTALL)
"""What the SDK puts around a service's sentence."""


def sdk() -> Any:
    """The package `tinker`. Raises ValueError, with what to install, where it is missing."""
    try:
        tinker = import_module("tinker")
    except ImportError as error:
        raise ValueError(
            f"backend='tinker': the service's SDK is missing ({error}); scripts/setup.sh tinker, or pip install tinker"
        ) from error
    log = logging.getLogger(_CLIENT_LOG)
    log.removeFilter(_not_on_loading)
    log.addFilter(_not_on_loading)
    return tinker


def _not_on_loading(record: logging.LogRecord) -> bool:
    # What the SDK offers in the place of `load_state` is another model, and a service may have room for one only.
    return "load_state" not in record.getMessage()


async def answered(future: Any, call: str, timeout_s: float) -> Any:
    """The result of one of the SDK's futures. Raises ValueError for a request that the service refuses, NoAnswer
    when no answer comes within `timeout_s` or the service cannot be reached, RuntimeError for everything else. Each
    message begins with `call`."""
    tinker = sdk()
    try:
        return await asyncio.wait_for(future.result_async(), timeout_s)
    except TimeoutError:
        raise NoAnswer(
            f"{call}: the service did not answer within {timeout_s:g} s; look at its log, or raise the deadline in "
            "controller.*_timeout_s"
        ) from None
    except tinker.APIConnectionError as error:
        raise NoAnswer(f"{call}: {describe(error)}; look whether the service runs at TINKER_BASE_URL") from error
    except (tinker.BadRequestError, tinker.UnprocessableEntityError) as error:
        body = error.body if isinstance(error.body, dict) else {}
        raise ValueError(f"{call}: {body.get('error') or body.get('detail') or describe(error)}") from error
    except tinker.RequestFailedError as error:
        sentence = framed[1] if (framed := _FRAME.match(error.message)) else error.message
        category = str(getattr(error.category, "value", error.category)).lower()
        raise (ValueError if category == "user" else RuntimeError)(f"{call}: {sentence}") from error
    except Exception as error:
        raise RuntimeError(f"{call}: {describe(error)}") from error


def not_offered(operation: str) -> NoReturn:
    """Raises RuntimeError for an operation that needs the model's weights."""
    raise RuntimeError(
        f"policy-0.{operation}: ValueError: a remote service keeps weights and gradients to itself, and the protocol "
        "has no such call; use backend='actors' or 'local'"
    )


class Samplers:
    """In the place of a store of weights: for each published version, the SDK's client that samples from it."""

    def __init__(self) -> None:
        self._clients: dict[int, Any] = {}

    def add(self, version: int, client: Any) -> None:
        self._clients[version] = client

    def client(self, version: int) -> Any:
        """Raises ValueError for a version that was deleted or never published."""
        if version not in self._clients:
            raise ValueError(f"policy_version={version}: is not published; the service has {sorted(self._clients)}")
        return self._clients[version]

    async def discard(self, version: int | str) -> None:
        """Forgets a version; the service keeps its weights until the session ends."""
        if isinstance(version, int):
            self._clients.pop(version, None)

    async def versions(self) -> list[int]:
        """The published versions, sorted."""
        return sorted(self._clients)

    async def fetch(self, version: int | str, *, verify: bool) -> NoReturn:
        not_offered("fetch")

    async def announce(self, manifest: AnyManifest) -> None:
        """Does nothing: `add` has made the version visible."""

    async def publish(self, *args: Any, **options: Any) -> NoReturn:
        not_offered("publish")

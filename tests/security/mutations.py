"""Bodies and addresses that are nearly right: a request that a server takes, with one to three things changed."""

import json
import random
from typing import Any
from urllib.parse import quote

_LEAVES: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, -(2**70), 1e308, 1e-320, float("nan"), float("inf"), "", "a" * 5000, "\ud800"),
    *(
        "\x00",
        "../../etc/passwd",
        "{{ 7*7 }}",
        "<script>",
        [],
        {},
        [[]],
        {"": None},
        [1] * 500,
        {"a": {"b": {"c": []}}},
    ),
]


def mutated(body: dict, chance: random.Random) -> bytes:
    """A body with some fields changed, or with some bytes changed."""
    changed = json.loads(json.dumps(body))
    if chance.random() < 0.75:
        for _ in range(chance.randint(1, 3)):
            _change(changed, chance)
        return json.dumps(changed).encode("utf-8", "surrogatepass")
    return _damaged(json.dumps(changed).encode(), chance)


def mutated_address(path: str, chance: random.Random) -> str:
    """An address with a piece replaced, repeated or left out."""
    pieces = path.replace("?", " ? ").replace("&", " & ").replace("=", " = ").split(" ")
    at = chance.randrange(len(pieces))
    leaf = str(chance.choice(_LEAVES)).encode("utf-8", "replace").decode()
    pieces[at] = chance.choice([quote(leaf[:3000]), pieces[at] * 2, "", quote(pieces[at] + leaf[:20])])
    address = "".join(pieces)
    return address if address.startswith("/") else f"/{address}"


def _change(value: Any, chance: random.Random) -> None:
    """Changes one place somewhere inside of a dictionary or a list."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = chance.choice(keys)
    if isinstance(value[key], (dict, list)) and value[key] and chance.random() < 0.6:
        return _change(value[key], chance)
    kind = chance.random()
    if kind < 0.6:
        value[key] = chance.choice(_LEAVES)
    elif kind < 0.75 and isinstance(value, dict):
        del value[key]
    elif kind < 0.85 and isinstance(value, dict):
        value[f"{key}x"] = value[key]
    elif isinstance(value[key], list):
        value[key] = value[key] * chance.choice([2, 50])
    else:
        value[key] = [value[key]] * 3


def _damaged(body: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(4)
    at = chance.randrange(len(body))
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]
    if kind == 2:
        return body[:at] + body[at // 2 :]
    return b"[" * chance.choice([10, 2000]) + body

"""The web page over runs, as an application: addresses, templates, answers to what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.guard import Guard, allowed_hosts
from torchtitan_rl.tools.view import evaluation_pages, pages, pair_pages, rollout_pages, text
from torchtitan_rl.tools.view.access import ReadOnly
from torchtitan_rl.tools.view.query import Parameters
from torchtitan_rl.tools.view.runs import ShownRun

__all__ = ["application"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_PAGES = {
    "/": ("health.html", pages.health),
    "/curves": ("curves.html", pages.curves),
    "/evaluations": ("evaluations.html", pages.evaluations),
    "/completions": ("completions.html", evaluation_pages.listed),
    "/task": ("task.html", evaluation_pages.task),
    "/completion": ("completion.html", evaluation_pages.completion),
    "/configs": ("configs.html", pages.configs),
    "/rollouts": ("rollouts.html", rollout_pages.listed),
    "/groups": ("groups.html", rollout_pages.groups),
    "/group": ("group.html", rollout_pages.group),
    "/pairs": ("pairs.html", pair_pages.pairs),
    "/pair": ("pair.html", pair_pages.pair),
    "/rollout": ("rollout.html", rollout_pages.rollout),
    "/text": ("text.html", rollout_pages.whole_text),
}
"""Address -> template, and what makes the template's values of the runs and the address's parameters."""
_TABS = {"/": "Health", "/curves": "Curves", "/evaluations": "Evaluations", "/rollouts": "Rollouts"}
_TABS |= {"/groups": "Groups", "/configs": "Configs"}


def application(runs: Sequence[ShownRun], allow_hosts: Collection[str] = ()) -> ReadOnly:
    """The page over some runs, an ASGI application that only reads. `allow_hosts` are names of this machine besides
    its loopback's, see `guard.allowed_hosts`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    templates = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    templates.globals |= {"tabs": list(_TABS.items()), "all_runs": runs, "tints": text.TINTS, "url": address}
    templates.filters |= {name: getattr(text, name) for name in ("visible", "cut", "number", "clock", "chunks")}
    templates.globals |= {"tint": text.tint, "token_title": text.token_title, "side": text.side, "CUT": text.CUT}

    def shown(path: str, template: str, values: dict[str, Any], status: int = 200) -> HTMLResponse:
        body = templates.get_template(template).render({"path": path, "chosen": [], "live": False, **values})
        return HTMLResponse(body.encode("utf-8", "replace"), status)

    def page(path: str, template: str, make: Any) -> Any:
        def answer(request: Request) -> Response:
            parameters = Parameters(request.url.path, request.query_params.multi_items(), runs)
            return shown(path, template, {"parameters": parameters, **make(parameters)})

        return answer

    for path, (template, make) in _PAGES.items():
        app.get(path, response_class=HTMLResponse)(page(path, template, make))

    @app.get("/api/curves")
    def curves(request: Request) -> Response:
        return JSONResponse(pages.curve_data(Parameters("/curves", request.query_params.multi_items(), runs)))

    @app.get("/curves.csv")
    def table(request: Request) -> Response:
        text = pages.curve_table(Parameters("/curves", request.query_params.multi_items(), runs))
        headers = {"content-disposition": 'attachment; filename="curves.csv"'}
        return Response(text.encode("utf-8", "replace"), media_type="text/csv; charset=utf-8", headers=headers)

    def failed(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 400
        message = "there is no such page" if status == 404 and not isinstance(error, pages.Missing) else str(error)
        if isinstance(error, pages.Missing):
            status = 404
        return shown("", "error.html", {"message": message, "parameters": Parameters("/", [], runs)}, status)

    def broken(request: Request, error: Exception) -> Response:
        logger.error("the page failed on %s", request.url.path, exc_info=error)
        message = f"this page failed ({type(error).__name__}); the others may work"
        return shown("", "error.html", {"message": message, "parameters": Parameters("/", [], runs)}, 500)

    app.exception_handler(HTTPException)(failed)
    app.exception_handler(ValueError)(failed)
    app.exception_handler(Exception)(broken)
    app.mount("/static", StaticFiles(directory=_HERE / "static"))
    return ReadOnly(Guard(app, hosts=allowed_hosts("127.0.0.1", False, allow_hosts), answer=_refusal))


def _refusal(refused: Refused, path: str) -> Response:
    return PlainTextResponse(f"{refused.message}\n", refused.status)


def address(path: str, **parameters: Any) -> str:
    """An address of the page; a parameter that is None or empty is left out, and a list is repeated."""
    pairs = [
        (name, one)
        for name, value in parameters.items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if one not in (None, "")
    ]
    return f"{path}?{urlencode(pairs)}" if pairs else path

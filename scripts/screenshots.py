#!/usr/bin/env python
"""Makes the pictures of the page over runs in docs/images, with the Chromium of this machine.

    .venv/bin/python scripts/screenshots.py runs/first runs/second

The first run is shown alone, and beside the others where runs are compared. `docs/view.md` shows the pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
SIZE: Any = {"width": 1280, "height": 760}


def main() -> None:
    runs = sys.argv[1:]
    name = Path(runs[0]).resolve().name
    pictures: dict[str, tuple[Any, str]] = {
        "view-health": ("light", "/"),
        "view-curves": ("dark", "/curves"),
        "view-rollouts": ("light", f"/rollouts?run={name}&sort=reward"),
        "view-group": ("dark", f"/groups?run={name}"),
        "view-rollout": ("light", f"/rollouts?run={name}&sort=advantage"),
    }
    command = [sys.executable, "-m", "torchtitan_rl.cli", "view", *runs, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            found = re.search(r"http://[\d.:]+", server.stdout.readline())
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
            )
            for picture, (scheme, address) in pictures.items():
                page = chromium.new_page(viewport=SIZE, color_scheme=scheme, base_url=found[0])
                page.goto(address)
                if picture == "view-rollout":
                    page.locator("tbody a").first.click()
                    page.locator(".tokens").first.focus()
                    page.keyboard.press("ArrowRight")
                page.wait_for_timeout(1500)
                page.screenshot(path=ROOT / "docs" / "images" / f"{picture}.png")
            chromium.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Makes the pictures of the page over runs in docs/images, with the Chromium of this machine.

    .venv/bin/python scripts/screenshots.py runs/first runs/second

The first run is shown alone, beside the second where runs are compared, and the last one's health first. `docs/view.md`
shows the pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
SIZE: Any = {"width": 1280, "height": 760}


def main() -> None:
    runs = sys.argv[1:]
    names = [Path(run).resolve().name for run in runs]
    name = names[0]
    pictures: dict[str, tuple[Any, str]] = {
        "view-health": ("light", f"/?run={names[-1]}"),
        "view-curves": ("dark", "/curves?" + "&".join(f"run={name}" for name in names[:2])),
        "view-rollouts": ("light", f"/rollouts?run={name}&sort=reward"),
        "view-group": ("dark", f"/groups?run={name}"),
        "view-rollout": ("light", f"/rollouts?run={name}&sort=advantage"),
    }
    command = [sys.executable, "-m", "torchtitan_rl.cli", "view", *runs, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            match = re.search(r"http://[\d.:]+", server.stdout.readline())
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
            )
            for picture, (scheme, address) in pictures.items():
                page = chromium.new_page(viewport=SIZE, color_scheme=scheme, base_url=match[0])
                page.goto(address)
                if picture == "view-rollout":
                    page.locator("tbody a").first.click()
                    page.locator(".tokens").first.focus()
                    page.keyboard.press("ArrowRight")
                page.wait_for_timeout(1500)
                file = ROOT / "docs" / "images" / f"{picture}.png"
                page.screenshot(path=file)
                with Image.open(file) as drawn:
                    drawn.convert("RGB").quantize(96).save(file, optimize=True)  # a third of the bytes
            chromium.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()

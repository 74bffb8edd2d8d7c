"""Open pages in a real browser: headless Chromium, driven by its command line."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: pages are not opened")

COLLECT = """<script>window.problems = [];
window.onerror = (message) => { window.problems.push(String(message)); };
for (const kind of ["error", "warn"]) console[kind] = (...words) => { problems.push(kind + ": " + words.join(" ")); };
window.requested = [];
const watch = new PerformanceObserver((list) => list.getEntries().forEach((e) => requested.push(e.name)));
watch.observe({type: "resource", buffered: true});
</script>"""


def visit(page: Path, script: str, profile: Path, *, width: int = 1100, dark: bool = False) -> dict[str, Any]:
    """Open a copy of the page, run `script` (its last value is `result`) and return that with problems and requests.

    The copy lies beside the page, so that relative links hold. The page itself has no hook for tests. A window is never
    narrower than 500 pixels, so the page is opened in a frame of its width.
    """
    text = page.read_text(encoding="utf-8")
    assert CHROMIUM is not None
    probe = (
        f"<script>setTimeout(() => {{ let result = null; try {{ {script} }} catch (e) "
        "{ problems.push(String(e)); }"
        "parent.postMessage(JSON.stringify({result, problems, requested}), '*'); }, 300);</script>"
    )
    copy, outside = page.with_name(f"probe_{page.name}"), page.with_name(f"frame_{page.name}")
    text = text.replace("<head>", f"<head>{COLLECT}", 1).replace("</body>", f"{probe}</body>", 1)
    copy.write_text(text, encoding="utf-8")
    outside.write_text(
        "<script>onmessage = (event) => { const out = document.createElement('pre'); out.id = 'probe';"
        "out.textContent = event.data; document.body.append(out); };</script>"
        f'<body style="margin:0"><iframe src="{copy.name}" style="border:0;width:{width}px;height:900px"></iframe>'
    )
    try:
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-extensions", "--disable-dev-shm-usage",
                f"--user-data-dir={profile}", f"--window-size={width + 20},920",
                *(["--blink-settings=preferredColorScheme=0"] if dark else []),
                "--virtual-time-budget=2000", "--dump-dom", outside.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )  # fmt: skip
    finally:
        copy.unlink()
        outside.unlink()
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"Chromium gave no page (exit code {done.returncode}): {done.stderr[-2000:]}"
    answer: dict[str, Any] = json.loads(unescape(found[1]))
    return answer

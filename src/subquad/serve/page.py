"""The page at `/`: write, chat or draw with the model, and see what it takes. It loads nothing from elsewhere."""

import base64
import functools
import hashlib
import re
from importlib.resources import files

from markupsafe import Markup

from subquad.report.html import environment

INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page() -> str:
    """The page, the same for all models: it asks the server which one there is."""
    from jinja2 import ChoiceLoader, PackageLoader

    shared = environment()
    assert shared.loader is not None
    templates = shared.overlay(loader=ChoiceLoader([PackageLoader("subquad.serve"), shared.loader]))
    return templates.get_template("serve.html").render(own=_own)


@functools.cache
def policy() -> str:
    """The Content-Security-Policy of the page: its own style and scripts, by their hashes, and this server."""
    allowed: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in INLINE.findall(page()):
        allowed[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    inline = "; ".join(f"{kind}-src {' '.join(hashes)}" for kind, hashes in allowed.items())
    nowhere = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {inline}; img-src data:; connect-src 'self'; {nowhere}"


def _own(name: str) -> Markup:
    return Markup(files("subquad.serve").joinpath("templates", name).read_text(encoding="utf-8"))

"""The fused feature maps as Triton functions, written from the table FEATURE_MAPS.

Each function picks the line of the map MAP. MAP is known when a kernel is compiled, so only that line is left in it.
"""

import linecache
from typing import Any

import triton
import triton.language as tl

from subquad.ops.feature_maps import FUSED


def _write(signature: str, lines: dict[str, str]) -> Any:
    body = "".join(f"    if MAP == {name!r}:\n        y = {line}\n" for name, line in lines.items())
    source = f"def {signature}:\n{body}    return y\n"
    file, name = f"<{__name__}: {signature}>", signature.partition("(")[0]
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # where Triton reads it
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])


phi = _write("phi(x, MAP: tl.constexpr)", {name: row.triton for name, row in FUSED.items()})
# d·φ'(x), from f = φ(x)
phi_pull = _write("phi_pull(d, f, MAP: tl.constexpr)", {name: row.triton_pull for name, row in FUSED.items()})
# where φ vanishes
phi_zero = _write("phi_zero(MAP: tl.constexpr)", {name: f'float("{row.zero}")' for name, row in FUSED.items()})

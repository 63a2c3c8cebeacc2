"""Which autograd the operators have: that of csrc/autograd, or Python's (autograd.py, autocast.py).

csrc/autograd is bound to the C++ interface of one minor version of torch and compiled once for each
that is known. The library of the running torch is loaded where there is one. Every other torch, and
FUSED_LAYERNORM_PYTHON_AUTOGRAD=1, takes Python's: the same results, some 10 us a call slower.

The build imports this file by its path, to name the libraries as it does: it uses nothing of the
package.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "autograd"
DISABLE = "FUSED_LAYERNORM_PYTHON_AUTOGRAD"

# Set by `load`: whether a library is registered, and why it is that one or none.
active = False
reason = ""


def released_minor(version: str) -> str | None:
    """ "2.11" of the version of a released torch; None of a development or vendor build.

    Those change the C++ interface between two releases under a version of their own making.
    """
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)?(\.post\d+)?(\+[\w.]+)?", version)
    return release[1] if release else None


def path_of(minor: str, folder: Path = FOLDER) -> Path:
    """The library for a minor version of torch."""
    return folder / f"libfused_layernorm_autograd_{minor.replace('.', '_')}.so"


def choose(
    version: str, folder: Path = FOLDER, environment: Mapping[str, str] = os.environ
) -> tuple[Path | None, str]:
    """The library to load under a version of torch, or None; and why, for people to read."""
    if environment.get(DISABLE) == "1":
        return None, f"{DISABLE}=1"
    minor = released_minor(version)
    if minor is None:
        return None, f"torch {version} is no release, so its C++ interface is not known"
    path = path_of(minor, folder)
    if not path.is_file():
        kept = sorted(folder.glob(path_of("*").name), key=lambda p: int(p.stem.rsplit("_", 1)[1]))
        known = [".".join(p.stem.rsplit("_", 2)[1:]) for p in kept]
        return None, f"this build has no library for torch {minor} ({' '.join(known) or 'nor any'})"
    return path, f"compiled for torch {minor}"


def load() -> bool:
    """Loads the library of the running torch, which registers itself; False where there is none."""
    global active, reason
    import torch  # not where the build imports this file

    path, reason = choose(torch.__version__)
    if path is None:
        return False
    try:
        torch.ops.load_library(path)
    except (
        OSError
    ) as error:  # the loader found a symbol missing, before any code of the library ran
        reason = f"{path.name} does not load: {error}"
        warnings.warn(f"fused_layernorm takes Python's autograd: {reason}", stacklevel=2)
        return False
    active = True
    return True

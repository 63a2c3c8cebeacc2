# SPDX-License-Identifier: Apache-2.0
"""Which autograd the operators have: csrc/per_torch's, or Python's (autograd.py).

A library of csrc/per_torch is bound to the C++ interface of one minor version of torch, so one is
compiled for each known version. The library for the running torch is loaded where there is one.
Under any other torch, and with FUSED_LAYERNORM_PYTHON_AUTOGRAD=1, the operators have Python's
autograd: the same results, some 10 us a call slower.

The build imports this file by its path, for the libraries' names, so it uses nothing else of ours.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "autograd"
DISABLE = "FUSED_LAYERNORM_PYTHON_AUTOGRAD"

REMEDY = "`pip install --no-deps --force-reinstall .` in the sources builds for the torch beside it"

# Set by `load`: whether a library is registered, and why this one or none.
active = False
reason = ""


def released_minor(version: str) -> str | None:
    """ "2.11" for the version "2.11.0" of a released torch; None for a development or vendor build.

    Such builds change the C++ interface between releases, under version numbers of their own.
    """
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)?(\.post\d+)?(\+[\w.]+)?", version)
    return release[1] if release else None


def path_of(minor: str, folder: Path = FOLDER) -> Path:
    """The library for a minor version of torch."""
    return folder / f"libfused_layernorm_autograd_{minor.replace('.', '_')}.so"


def choose(
    version: str, folder: Path = FOLDER, environment: Mapping[str, str] = os.environ
) -> tuple[Path | None, str]:
    """The library to load under a version of torch, or None; and the reason, for people to read."""
    if environment.get(DISABLE) == "1":
        return None, f"{DISABLE}=1"
    minor = released_minor(version)
    if minor is None:
        return None, f"torch {version} is no release, so its C++ interface is not known"
    path = path_of(minor, folder)
    if not path.is_file():
        kept = sorted(folder.glob(path_of("*").name), key=lambda p: int(p.stem.rsplit("_", 1)[1]))
        known = [".".join(p.stem.rsplit("_", 2)[1:]) for p in kept]
        built = " ".join(known) or "nor any"
        return None, f"this build has no library for torch {minor} ({built}); {REMEDY}"
    return path, f"compiled for torch {minor}"


def load() -> None:
    """Loads the library for the running torch, if there is one; it registers itself."""
    global active, reason
    import torch  # not at the top, since the build imports this file

    path, reason = choose(torch.__version__)
    if path is None:
        return
    try:
        torch.ops.load_library(path)
    except OSError as error:  # a symbol is missing, and no code of the library has run
        reason = f"{path.name} does not load: {error}"
        warnings.warn(f"fused_layernorm takes Python's autograd: {reason}", stacklevel=2)
        return
    active = True

# SPDX-License-Identifier: Apache-2.0
"""What is known of other libraries: the rows of known.txt, which says how they are written.

A class is looked up by the names of its module and of itself, so no library is imported. A class
whose forward has a source that is not listed for it is not swapped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import forwards, groups, heads, liger, modulated, rms
from .classes import Known

# From the digest of a forward's source (source.digest) to what is known of it.
Sources = dict[str, Known]
CLASSES: dict[tuple[str, str], Sources] = {}  # by (module, class)
SOURCES: Sources = {}  # for classes of any module
_MODULES: dict[str, Any] = {
    one.__name__.rpartition(".")[2]: one for one in (forwards, groups, heads, liger, modulated, rms)
}


def _known(kind: str, of: Any, name: str) -> Any:
    if of is modulated:
        return Known(kind, of.derived, (*name.split("+"),), of.members)
    found = eval(name.removesuffix("+act"), vars(of))
    if of is heads:
        return found
    return Known(kind, groups.then_act(found) if name.endswith("+act") else found)


def _path(library: str, name: str) -> tuple[str, str]:
    module, _, cls = name.rpartition(".")
    if library == "transformers:":
        folder, _, file = module.partition(".")
        module = f"models.{folder}.modeling_{file or folder}"
    elif library == "diffusers:" and not module.startswith("pipelines."):
        module = f"models.{module}"
    return f"{library[:-1]}.{module}", cls


def _enter(text: str) -> None:
    kind, of = "", None
    for row in re.split(r"\n+(?! )", re.sub(" *#.*", "", text).strip()):
        if row.startswith("["):
            kind, module = row.strip("[]").split()
            of = _MODULES[module]
            continue
        name, digests, *classes = row.split()
        sources = dict.fromkeys(digests.split(","), _known(kind, of, name))
        if not classes:
            (heads.SOURCES if of is heads else SOURCES).update(sources)
        for cls in classes[1:]:
            CLASSES.setdefault(_path(classes[0], cls), {}).update(sources)


_enter(Path(__file__).with_name("known.txt").read_text())

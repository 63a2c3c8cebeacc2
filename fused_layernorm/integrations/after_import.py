# SPDX-License-Identifier: Apache-2.0
"""Registrations with other packages, made once such a package is imported and not before."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, register: Callable[[], None], failure: str) -> None:
    """Calls a function after the module of this name has been imported, or now if it has been.

    What it registers with may have other names in another release: an error warns, with `failure`.
    """

    def then() -> None:
        try:
            register()
        except Exception as error:
            warnings.warn(f"{failure}: {error!r}", stacklevel=2)

    if name in sys.modules:
        then()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(then)


class _Finder(MetaPathFinder):
    """Lets the loaders of modules that are waited for say when they have run a module's code.

    To be asked for a module is not to import it (importlib.util.find_spec asks; imports may fail).
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self._asking: set[tuple[int, str]] = set()  # threads, and what they ask other finders for

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asked = (threading.get_ident(), fullname)
        if fullname not in self.waiting or asked in self._asking:
            return None
        self._asking.add(asked)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.discard(asked)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        for then in self.waiting.pop(module.__name__, ()):
            then()


_finder = _Finder()

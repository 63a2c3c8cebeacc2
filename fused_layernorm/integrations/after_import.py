# SPDX-License-Identifier: Apache-2.0
"""Registrations with other packages, made once such a package is imported and not before."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, register: Callable[[], None], failure: str) -> None:
    """Calls a function after the module of this name has been imported, or now if it has been.

    What it registers with may have other names in another release: an error becomes a warning that
    begins with `failure`.
    """

    def then() -> None:
        try:
            register()
        except Exception as error:
            warnings.warn(f"{failure}: {error!r}", stacklevel=2)

    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Import(name, then))


class _Import(MetaPathFinder, Loader):
    """Calls a function once, after the module of this name has been imported."""

    _loader: Loader  # the module's own

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()

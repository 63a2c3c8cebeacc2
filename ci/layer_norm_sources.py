# SPDX-License-Identifier: Apache-2.0
"""The norm classes in a folder of Python sources, and whether the swaps know them.

    python ci/layer_norm_sources.py .venv/lib/python3.11/site-packages/timm
    python ci/layer_norm_sources.py --rms .venv/lib/python3.11/site-packages/transformers

Nothing is imported from the folder, so any version of a package will do, unpacked anywhere. For a
new release, read what each unknown class computes, and enter the class with its digest, or the
digest of an RMSNorm, into fused_layernorm/swap/known.txt.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from fused_layernorm.swap import source
from fused_layernorm.swap.registry import CLASSES, SOURCES

Class = tuple[str, ast.ClassDef, dict[str, ast.FunctionDef]]


def classes(folder: Path) -> Iterator[Class]:
    """(module, class, the functions of its module) of each class in the folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "norm" not in text.lower():
            continue
        body = ast.parse(text).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        yield from ((module, node, functions) for node in body if isinstance(node, ast.ClassDef))


def is_layer_norm(cls: ast.ClassDef) -> bool:
    """Whether the class may be a LayerNorm."""
    return "LayerNorm" in cls.name or any("LayerNorm" in ast.unparse(base) for base in cls.bases)


def is_rms_norm(cls: ast.ClassDef, found: str | None) -> bool:
    """Whether the class has the name, or the known source, of an RMSNorm."""
    return "rmsnorm" in cls.name.lower().replace("_", "") or found in SOURCES


def digest(cls: ast.ClassDef, functions: dict[str, ast.FunctionDef]) -> str | None:
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    forward = methods.get("forward")
    if forward is None:
        return None
    called = source.trees(forward, functions.get, methods.get)
    return source.digest_of_trees(forward, called)


def known_layer_norm(module: str, cls: ast.ClassDef, found: str | None) -> str:
    sources = CLASSES.get(f"{module}.{cls.name}")
    if found in SOURCES:
        return "computes RMSNorm"
    if sources is None:
        return "not in the table"
    return "known" if found is None or found in sources else "its source is not known"


def known_rms_norm(module: str, cls: ast.ClassDef, found: str | None) -> str:
    sources = CLASSES.get(f"{module}.{cls.name}", SOURCES)
    return "known" if found in sources else "its source is not known"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rms", action="store_true", help="list the RMSNorms, not the LayerNorms")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    for module, cls, functions in classes(args.folder.resolve()):
        found = digest(cls, functions)
        if not (is_rms_norm(cls, found) if args.rms else is_layer_norm(cls)):
            continue
        known = (known_rms_norm if args.rms else known_layer_norm)(module, cls, found)
        print(f"{found or 'inherits forward':16} {known:24} {module} {cls.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The LayerNorm classes in a folder of Python sources, and whether swap_table knows them.

    python ci/layer_norm_sources.py .venv/lib/python3.11/site-packages/timm

Nothing is imported from the folder, so any version of a package will do, unpacked anywhere. For a
new release, read what each unknown class computes, and enter the class with its digest into
fused_layernorm/swap_table.py.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from fused_layernorm import swap_source, swap_table


def classes(folder: Path) -> Iterator[tuple[str, ast.ClassDef, dict[str, ast.FunctionDef]]]:
    """(module, class, the functions of its module), of each class that may be a LayerNorm."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(errors="replace")
        if "LayerNorm" not in text:
            continue
        body = ast.parse(text).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for node in body:
            if isinstance(node, ast.ClassDef) and (
                "LayerNorm" in node.name
                or any("LayerNorm" in ast.unparse(base) for base in node.bases)
            ):
                yield module, node, functions


def digest(cls: ast.ClassDef, functions: dict[str, ast.FunctionDef]) -> str | None:
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    forward = methods.get("forward")
    if forward is None:
        return None
    called = swap_source.trees(forward, functions.get, methods.get)
    return swap_source.digest_of_trees(forward, called)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for module, cls, functions in classes(parser.parse_args().folder.resolve()):
        found = digest(cls, functions)
        sources = swap_table.CLASSES.get((module, cls.name))
        if found in swap_table.RMS_NORMS:
            known = "computes RMSNorm"
        elif sources is None:
            known = "not in the table"
        elif found is None or found in sources:
            known = "known"
        else:
            known = "its source is not known"
        print(f"{found or 'inherits forward':16} {known:24} {module} {cls.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

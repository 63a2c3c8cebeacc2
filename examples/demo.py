# SPDX-License-Identifier: Apache-2.0
"""All examples in turn: what `make demo` runs.

python examples/demo.py [NAME ...]        those named only
"""

from __future__ import annotations

import importlib
import sys

from _common import say

EXAMPLES = ("sentence_encoder", "decoder", "image_decoder", "kernelbench", "attention",
            "diffusion_transformer")  # fmt: skip


def main(names: list[str]) -> None:
    for name in names:
        if name not in EXAMPLES:
            raise SystemExit(f"no example {name!r}: there are {', '.join(EXAMPLES)}")
    for name in names or EXAMPLES:
        importlib.import_module(name).main()
        say()
    say("all examples passed" if len(names) != 1 else "the example passed")


if __name__ == "__main__":
    main(sys.argv[1:])

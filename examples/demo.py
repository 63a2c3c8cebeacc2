# SPDX-License-Identifier: Apache-2.0
"""All examples, one after the other: what `make demo` runs.

python examples/demo.py [NAME ...]        those named only
"""

from __future__ import annotations

import sys

import decoder
import diffusion_transformer
import image_decoder
import kernelbench
import sentence_encoder
import transformer_block
from _common import say

EXAMPLES = {
    "sentence_encoder": sentence_encoder.main,
    "decoder": decoder.main,
    "image_decoder": image_decoder.main,
    "kernelbench": kernelbench.main,
    "transformer_block": transformer_block.main,
    "diffusion_transformer": diffusion_transformer.main,
}


def main(names: list[str]) -> None:
    for name in names:
        if name not in EXAMPLES:
            raise SystemExit(f"no example {name!r}: there are {', '.join(EXAMPLES)}")
    for name in names or EXAMPLES:
        EXAMPLES[name]()
        say()
    say("all examples passed" if len(names) != 1 else "the example passed")


if __name__ == "__main__":
    main(sys.argv[1:])

"""All examples, one after the other: what `make demo` runs."""

from __future__ import annotations

import kernelbench
import sentence_encoder
import transformer_block
from _common import say


def main() -> None:
    for example in (sentence_encoder, kernelbench, transformer_block):
        example.main()
        say()
    say("all examples passed")


if __name__ == "__main__":
    main()

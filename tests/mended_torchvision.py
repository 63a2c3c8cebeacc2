"""torchvision, made to import beside a PyTorch that its binary was not built for."""

import re
import sys

import torch


def mend_torchvision():
    """Let a torchvision be imported whose binary was built for another PyTorch than this one.

    transformers and timm import it, and fail where it fails: for lack of its own operators, of
    which these models use none. Each that it misses is declared, until it imports.
    """
    library = None
    while True:
        try:
            import torchvision  # noqa: F401

            return library
        except ImportError:
            return None
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            library = library or torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]


MENDED = mend_torchvision()  # kept, for its declarations last as long

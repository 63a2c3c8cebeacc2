# SPDX-License-Identifier: Apache-2.0
"""Build the layout that Hugging Face's `kernels` loads: OUT/build/<variant>/.

    python ci/hf_kernels.py OUT

compiles the package as `setup.py` does (FUSED_LAYERNORM_CPU_ONLY, TORCH_CUDA_ARCH_LIST and the
like hold here too) and lays it out once for each variant that the binary serves: variants for its
CUDA version, or one for the CPU if it has no CUDA kernels. Every build has its operators in a
namespace of its own, named by a hash of its sources, so that several builds can be loaded into one
process, also beside the installed package. OUT can then be given to LocalLayerRepository or
uploaded to the Hub.
"""

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "fused_layernorm"
LICENSE = "Apache-2.0"
STABLE_ABI = "210"  # LibTorch 2.10, as TORCH_TARGET_VERSION in setup.py
# The one line in the package that names the namespace.
NAMESPACE_FILE = "ops/load.py"
NAMESPACE_LINE = 'NAMESPACE = "fused_layernorm"'
# The __init__.py of the folder with the package's name, in which older versions of `kernels` look.
COMPATIBILITY = """\
import sys
from importlib import util
from pathlib import Path

if "{id}" not in sys.modules:
    _path = Path(__file__).resolve().parents[1] / "__init__.py"
    _spec = util.spec_from_file_location("{id}", _path)
    sys.modules["{id}"] = util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{id}"])
globals().update(vars(sys.modules["{id}"]))
"""


def identifier_of_build() -> str:
    """The build's name as a module and as a namespace: a hash of all that goes into the build."""
    digest = hashlib.sha256()
    folders = [REPOSITORY / "csrc", REPOSITORY / PACKAGE]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    for path in sorted([*paths, REPOSITORY / "setup.py"]):
        if "__pycache__" not in path.parts and path.suffix != ".so":
            digest.update(path.relative_to(REPOSITORY).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    for key in ("FUSED_LAYERNORM_CPU_ONLY", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME"):
        digest.update(f"{key}={os.environ.get(key, '')}\0".encode())
    return f"_{PACKAGE}_{digest.hexdigest()[:12]}"


def build(identifier: str, folder: Path) -> Path:
    """The package as a wheel would hold it, with the identifier as its namespace."""
    command = [sys.executable, "setup.py", "build", "--build-lib", str(folder)]
    env = os.environ | {"FUSED_LAYERNORM_NAMESPACE": identifier}
    result = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        sys.exit(f"{result.stdout}\nhf_kernels: the build failed")
    path = folder / PACKAGE / NAMESPACE_FILE
    text = path.read_text()
    if text.count(NAMESPACE_LINE) != 1:
        sys.exit(f"hf_kernels: expected the line {NAMESPACE_LINE} once in {NAMESPACE_FILE}")
    path.write_text(text.replace(NAMESPACE_LINE, f'NAMESPACE = "{identifier}"'))
    return folder / PACKAGE


def facts_of(package: Path) -> dict[str, Any]:
    """What `python -m fused_layernorm --json` says of the package."""
    command = [sys.executable, "-m", PACKAGE, "--json"]
    env = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    output = subprocess.run(
        command, cwd=package.parent, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return json.loads(output)


def variants_of(cuda: str | None) -> list[str]:
    """The names of the variants that a binary serves.

    A binary has its own CUDA runtime, so it runs under any torch if the driver is recent enough for
    that runtime. A variant for CUDA x.y is loaded by every torch for CUDA x.z with z >= y; 12.6 is
    the oldest CUDA 12 for which there is a torch 2.10.
    """
    served = {None: ["cpu"], "12": ["cu126", "cu130"], "13": ["cu130"]}
    major = cuda.split(".")[0] if cuda else None
    if major not in served:
        sys.exit(f"hf_kernels: expected CUDA 12 or 13, got {cuda}")
    system = f"{platform.machine()}-{platform.system().lower()}"
    return [f"torch-stable-abi{STABLE_ABI}-{backend}-{system}" for backend in served[major]]


def version() -> int:
    """The major version, all that `kernels` knows; 0 says that the interface may change."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    found = re.search(r'^version = "(\d+)\.', text, re.MULTILINE)
    if found is None:
        sys.exit("hf_kernels: pyproject.toml names no version")
    return int(found[1])


def dotted(arch: str) -> str:
    """ "90" -> "9.0", "120+PTX" -> "12.0+PTX"."""
    return re.sub(r"^(\d+)(\d)", r"\1.\2", arch)


def digest_of(folder: Path) -> dict[str, Any]:
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {"algorithm": "sha256", "files": files}


def lay_out(package: Path, folder: Path, identifier: str, archs: list[str]) -> None:
    """One variant: the package, the folder of its name, its metadata."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(COMPATIBILITY.format(id=identifier))
    metadata = {
        "id": identifier,
        "name": PACKAGE.replace("_", "-"),
        "version": version(),
        "license": LICENSE,
        "python-depends": [],
        "backend": (
            {"type": "cuda", "archs": [dotted(arch) for arch in archs]}
            if archs
            else {"type": "cpu"}
        ),
        "digest": digest_of(folder),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    identifier = identifier_of_build()
    with tempfile.TemporaryDirectory() as temporary:
        package = build(identifier, Path(temporary))
        facts = facts_of(package)
        for variant in variants_of(facts["compiled_with_cuda"]):
            lay_out(package, out / "build" / variant, identifier, facts["compiled_for"])
            print(f"{out / 'build' / variant}: {identifier}")


if __name__ == "__main__":
    main()

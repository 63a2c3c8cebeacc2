"""Build of fused_layernorm._C, with CUDA kernels where there is an nvcc, and of C++ autograd.

The binary uses LibTorch's stable ABI and CPython's limited API and carries its own CUDA runtime,
so one file serves every Python >= 3.10 and every torch >= 2.10, whatever they were built with.
Autograd in C++ is bound to one minor version of torch: csrc/autograd/build.py compiles it.
Everything else about the package stands in pyproject.toml.

Environment variables:
    CUDA_HOME                       the CUDA toolkit (else: the nvcc on PATH, then usual places)
    TORCH_CUDA_ARCH_LIST            e.g. "9.0", "8.0;9.0+PTX" (else: every one in DEFAULT_ARCHS
                                    that nvcc knows, and PTX of the newest)
    MAX_JOBS                        files compiled at once (else: one a core)
    FUSED_LAYERNORM_TORCH_HEADERS   a folder of C++ headers of other versions of torch, for which
                                    csrc/autograd is compiled too (see csrc/autograd/build.py)
    FUSED_LAYERNORM_CPU_ONLY=1      leave the CUDA kernels out even where there is an nvcc
    FUSED_LAYERNORM_PTXAS_VERBOSE=1 let ptxas print registers, stack and spills of every kernel
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

_spec = importlib.util.spec_from_file_location("autograd_build", "csrc/autograd/build.py")
assert _spec is not None
assert _spec.loader is not None
autograd_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(autograd_build)

# Machine code for x.0 runs on every device of major version x: that for 8.0 serves 8.6, 8.7 and 8.9
# too. 11.0 and 12.0 run the PTX of 10.0, compiled by the driver at first use: with their machine
# code as well (some 4 MB each) the wheel would exceed 20 MB.
DEFAULT_ARCHS = ["7.5", "8.0", "9.0", "10.0"]
NAMED_ARCHS = {
    "Turing": "7.5",
    "Ampere": "8.0 8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0 12.0",
}
TORCH_TARGET_VERSION = "0x020a000000000000"  # torch 2.10: the oldest that the binary loads under
COMPRESS_MODE_SINCE = (12, 8)
CUDA_BINDINGS = "csrc/bindings/cuda/*.cpp"  # left out of a build without CUDA kernels


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def find_cuda_home() -> Path | None:
    """The root of the first CUDA toolkit that has an nvcc, or None."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        # The nvcc on PATH may be a link or a script: nvcc itself knows where its toolkit lies.
        top = re.search(r"^#\$ TOP=(.+)$", run(nvcc, "-v", "--dryrun", "none.cu"), re.MULTILINE)
        candidates.append(top[1].strip() if top else str(Path(nvcc).resolve().parents[1]))
    candidates += ["/usr/local/cuda", *sorted(glob("/usr/local/cuda-*"), reverse=True)]
    candidates += ["/opt/cuda", "/usr/lib/cuda"]
    for candidate in filter(None, candidates):
        if (Path(candidate) / "bin" / "nvcc").is_file():
            return Path(candidate).resolve()
    return None


def cuda_version(nvcc: str) -> tuple[int, int]:
    release = re.search(r"release (\d+)\.(\d+)", run(nvcc, "--version"))
    if release is None:
        sys.exit(f"fused_layernorm: {nvcc} --version names no release")
    return int(release[1]), int(release[2])


def arch_list(nvcc: str) -> list[str]:
    """The architectures to compile for, as "90", "90a" or "90+PTX", in the order given."""
    known = set(re.findall(r"compute_(\d+)", run(nvcc, "--list-gpu-arch")))
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    for name, meant in NAMED_ARCHS.items():
        wanted = wanted.replace(name, meant)
    archs = wanted.replace(";", " ").replace(",", " ").split()
    if not archs:
        archs = [arch for arch in DEFAULT_ARCHS if arch.replace(".", "") in known]
        archs[-1] += "+PTX"
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if match is None or match[1] + match[2] not in known:
            offered = " ".join(f"{a[:-1]}.{a[-1]}" for a in sorted(known, key=int))
            sys.exit(f"fused_layernorm: TORCH_CUDA_ARCH_LIST has {arch!r}; {nvcc} knows {offered}")
    archs = list(dict.fromkeys(arch.replace(".", "") for arch in archs))
    return [arch for arch in archs if arch + "+PTX" not in archs]


def gencode_flags(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nvcc_flags(version: tuple[int, int], archs: list[str], files: int) -> list[str]:
    jobs = int(os.environ.get("MAX_JOBS") or cpu_count())
    # Files are compiled side by side; cores beyond their number take architectures of one file.
    threads = max(1, min(jobs // files, len(archs)))
    flags = ["-O3", f"--threads={threads}", *gencode_flags(archs)]
    if version >= COMPRESS_MODE_SINCE:
        flags += ["--compress-mode=size", f"--split-compile={jobs}"]
    if os.environ.get("FUSED_LAYERNORM_PTXAS_VERBOSE") == "1":
        flags.append("-Xptxas=-v")
    return flags


def make_extension() -> tuple[Extension, str]:
    """The extension module, and what it is built for, in words."""
    define_macros = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)]
    cxx_flags = ["-O3", "-g0"]
    cuda_flags: list[str] = []
    link_args: list[str] = []
    libraries = ["torch_cpu"]
    library_dirs: list[str] = []
    if sys.platform == "linux":
        # libtorch_cuda.so is loaded with local scope: its symbols are found through libtorch.so
        # alone, which therefore stays a needed library although no symbol of it is used directly.
        link_args += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
        link_args += ["-Wl,--version-script=csrc/bindings/exports.map", "-s"]
    sources = sorted(glob("csrc/bindings/*.cpp") + glob("csrc/plan/*.cpp"))

    cpu_only = os.environ.get("FUSED_LAYERNORM_CPU_ONLY") == "1"
    cuda_home = None if cpu_only else find_cuda_home()
    if cuda_home is None:
        reason = "FUSED_LAYERNORM_CPU_ONLY=1" if cpu_only else "no nvcc: set CUDA_HOME or PATH"
        kind = f"without CUDA kernels ({reason})"
        make = cpp_extension.CppExtension
    else:
        nvcc = str(cuda_home / "bin" / "nvcc")
        version = cuda_version(nvcc)
        version_string = ".".join(map(str, version))
        archs = arch_list(nvcc)
        kind = f"with CUDA {version_string} of {cuda_home} for {' '.join(archs)}"
        # A CPU-only torch reports no CUDA, and a CUDA torch asks for an nvcc of its own version.
        # The binary, with a CUDA runtime inside, needs neither to agree.
        cpp_extension.CUDA_HOME = str(cuda_home)
        torch.version.cuda = version_string
        make = cpp_extension.CUDAExtension
        cuda_sources = sorted(glob("csrc/**/*.cu", recursive=True))
        sources += sorted(glob(CUDA_BINDINGS)) + cuda_sources
        define_macros.append(("FUSED_LAYERNORM_CUDA", "1"))
        cxx_flags += [
            f'-DFUSED_LAYERNORM_CUDA_VERSION="{version_string}"',
            f'-DFUSED_LAYERNORM_ARCHS="{" ".join(archs)}"',
        ]
        cuda_flags = nvcc_flags(version, archs, len(cuda_sources))
        libraries += ["cudart_static", "rt", "dl", "pthread"]
        library_dirs += [str(cuda_home / "lib64"), str(cuda_home / "lib")]

    module = make(
        name="fused_layernorm._C",
        sources=sources,
        depends=sorted(glob("csrc/**/*.*", recursive=True)),
        include_dirs=[str(Path(__file__).resolve().parent / "csrc")],
        define_macros=define_macros,
        extra_compile_args={"cxx": cxx_flags, "nvcc": cuda_flags},
        extra_link_args=link_args,
        library_dirs=library_dirs,
        py_limited_api=True,
    )
    # Only what the stable ABI offers, and no CUDA library that a machine may lack.
    module.libraries = libraries
    return module, kind


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # One folder of objects for each kind of binary, whether for a wheel, an editable install
        # or in place: what did not change is not compiled again.
        key = hashlib.sha256(f"{sys.prefix} {torch.__version__} {kind}".encode()).hexdigest()[:8]
        self.build_temp = os.path.join("build", f"objects-{key}")
        os.environ.setdefault("MAX_JOBS", str(cpu_count()))

    def build_extensions(self) -> None:
        print(f"fused_layernorm: building {kind}", flush=True)
        super().build_extensions()

    def run(self) -> None:
        headers, notes = autograd_build.wanted(
            torch.__version__, Path(cpp_extension.include_paths()[0])
        )
        print("fused_layernorm: autograd in C++ for torch", *(headers or ["of no version"]))
        print("".join(f"fused_layernorm: {note}\n" for note in notes), end="", flush=True)
        package = Path(self.get_ext_fullpath(extension.name)).parent
        autograd_build.build(package, headers, int(os.environ["MAX_JOBS"]))
        super().run()


extension, kind = make_extension()
setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

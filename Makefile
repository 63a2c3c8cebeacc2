# SPDX-License-Identifier: Apache-2.0
# The developer's verbs. `make test` and `make demo` need nothing but Python >= 3.10, a C++
# compiler and, beside a GPU, nvcc: they make the environment .venv for themselves.
#
#   PYTHON=python3.12     the Python that .venv is made from
#   TORCH=torch==2.15.0   the torch that goes into .venv, unless one is there
#   VENV=dir              another environment than .venv (an activated one is used as it is)
#   NO_VENV=1             no environment: PYTHON with the packages it has, nothing installed
#   PYTEST_ARGS="-k add"  passed on by make test; "--cov=fused_layernorm" measures coverage
#   JOBS=2                the processes of make test
#   BENCH_ARGS, DEMO_ARGS passed on by make bench and make demo
#   CARRY="diffusers ..." the packages that make carry downloads, for ci/on_gpu on a machine without
#                         a registry, of CARRY_PYTHON

PYTHON ?= python3
CARRY ?= diffusers liger-kernel nvidia-cudnn-frontend fla-core einops
CARRY_PYTHON ?= 3.12
TORCH ?= torch==2.13.0
JOBS ?= 2
VENV ?= $(or $(VIRTUAL_ENV),.venv)
LOCAL_ARCHS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| sort -u | paste -sd ';' -)

SHELL := bash
.SHELLFLAGS := -o pipefail -c

ifdef NO_VENV
PY := $(PYTHON)
CLANG_FORMAT := clang-format
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format
endif

.PHONY: help env build test bench demo docs tools locks lint format wheel carry clean

help:
	@echo "make build | test | bench | demo | docs | lint | format | locks | wheel | carry | clean   (see the Makefile's top)"

# An environment with torch and what the build needs.
env:
ifndef NO_VENV
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("fused_layernorm needs Python >= 3.10; $(PYTHON) is %d.%d (choose with PYTHON=...)" % v[:2])'
	@test -x $(PY) || { echo "making the environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH) into $(VENV)"; \
		$(PY) -m pip install --progress-bar off -q -U pip "$(TORCH)"; }
	@$(PY) -m pip install --progress-bar off -q 'setuptools>=77' wheel ninja numpy
endif

# The kernels are compiled for the GPU at hand (without one: for Hopper), to be quick. Only
# `make wheel` compiles for all. The package is installed editable; EXTRAS says with what.
# Without a GPU, test and demo leave them out, unless they are compiled already, or somebody has said
# for what: no device runs them, and on two cores they take some eight minutes.
ifeq ($(LOCAL_ARCHS)$(TORCH_CUDA_ARCH_LIST)$(wildcard build/objects-*/csrc/layernorm_kernel.o),)
test demo: export FUSED_LAYERNORM_CPU_ONLY ?= 1
endif
build test bench demo docs: export TORCH_CUDA_ARCH_LIST ?= $(or $(LOCAL_ARCHS),9.0)
test: EXTRAS := [test]
bench: EXTRAS := [test]
demo: EXTRAS := [demo]

# What EXTRAS needs comes while the compiler works, the first time; what fails there is left to the
# installation. (An older pip lacks the option.)
ifndef NO_VENV
build: MEANWHILE = $(if $(wildcard fused_layernorm/*.so),,$(if $(EXTRAS),$(PY) -m pip install -q --progress-bar off --no-build-isolation \
	--only-deps '.$(EXTRAS)' >/dev/null 2>&1 &))
endif

# The libraries first, by themselves: pip would keep ninja's progress to itself.
build: env
	@test "$$FUSED_LAYERNORM_CPU_ONLY" = 1 && echo "building without CUDA kernels" || \
		echo "building for TORCH_CUDA_ARCH_LIST=$(TORCH_CUDA_ARCH_LIST) (minutes, the first time)"
	$(MEANWHILE) $(PY) setup.py -q egg_info build_ext --inplace && wait
ifndef NO_VENV
	$(PY) -m pip install --progress-bar off --no-build-isolation -e '.$(EXTRAS)' \
		| grep -vE '^(Requirement already|Looking in|Collecting|Processing|  Downloading|  Using cached)'
endif
	$(PY) -m fused_layernorm

# In JOBS processes, where pytest-xdist is installed, each with one thread for arithmetic.
test: export OMP_NUM_THREADS ?= 1
test: build
ifndef NO_VENV
	$(PY) tests/libraries.py
endif
	$(PY) -m pytest -q $$($(PY) -c 'import xdist' 2>/dev/null && printf -- '-n %s --dist worksteal' $(JOBS)) $(PYTEST_ARGS)

bench: build
	$(PY) -m benchmarks.run $(BENCH_ARGS)

demo: build
	$(PY) examples/demo.py $(DEMO_ARGS)

# The documentation site, in build/docs.
docs: build
ifndef NO_VENV
	@$(PY) -m pip install --progress-bar off -q --require-hashes -r ci/locks/docs.txt
endif
	$(PY) -m sphinx -E -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "written: build/docs/index.html"

tools: env
ifndef NO_VENV
	@$(PY) -m pip install --progress-bar off -q --require-hashes -r ci/locks/lint.txt
endif

# What lint, docs, CI and a release install, by version and hash, for every Python, from the groups
# of pyproject.toml. What is locked stays at its version; UV_ARGS=--upgrade takes the newest.
locks: env
	@$(PY) -m pip install --progress-bar off -q uv
	for group in lint docs ci wheel wheel-tests; do \
		$(PY) -m uv pip compile -q --universal --generate-hashes --no-header --python-version 3.10 \
			$(UV_ARGS) --group $$group -o ci/locks/$$group.txt || exit; done

CSRC := $(shell find csrc -name "*.cpp" -o -name "*.cu" -o -name "*.h" -o -name "*.cuh")

lint: tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) ci/mutations.py --check
	$(CLANG_FORMAT) --dry-run -Werror $(CSRC)

format: tools
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CSRC)

# One wheel for every Python >= 3.10 and every torch >= 2.10, in dist/. Autograd is compiled for every
# minor version of torch whose headers the registry gives.
wheel: export FUSED_LAYERNORM_TORCH_HEADERS ?= $(CURDIR)/build/torch-headers
wheel: env
	rm -rf build/lib* dist/*.whl
	$(PY) build_tools/per_torch.py "$$FUSED_LAYERNORM_TORCH_HEADERS"
	$(PY) -m pip wheel --progress-bar off --no-build-isolation --no-deps -w dist .
	@ls -l dist/*.whl

# Wheels for a machine that reaches no registry, in .carry/: ci/on_gpu installs them there. Without
# what they need; a package that is missing is named in CARRY too.
carry: env
	rm -rf .carry
	$(PY) -m pip download --progress-bar off -q -d .carry --no-deps --only-binary=:all: \
		--python-version $(CARRY_PYTHON) --implementation cp --abi cp$(subst .,,$(CARRY_PYTHON)) \
		--abi abi3 --abi none $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) \
		--platform manylinux2014_x86_64 $(CARRY)
	@ls -l .carry

# Everything but the environment.
clean:
	rm -rf build dist wheelhouse .carry *.egg-info fused_layernorm/*.so fused_layernorm/autograd
	rm -rf .mypy_cache .pytest_cache .ruff_cache .coverage

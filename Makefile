# Two words to start with: `make demo` and `make test`. Each does all the set-up it needs; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -q --no-compile -c constraints.txt
# The package from this tree, its engine with what the tests need of it.
EDITABLE := $(PIP) --no-build-isolation --config-settings build-dir=.make/build --config-settings cmake.define.ZCKPT_TESTING=ON -e
CORE := $(wildcard zckpt/csrc/* CMakeLists.txt)
# The tests start thousands of programs: what they import is compiled once, not each time; what none imports, never.
export PYTHONDONTWRITEBYTECODE =
# Two at once, of which each computes on one processor; what takes longest comes first (tests/shares.py).
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -q

FUZZ_EXAMPLES ?= 3000
FUZZ_SECONDS ?= 120

.PHONY: demo test proofs fuzz check sanitize asan tsan wheels wheels-here docs bench fixtures golden clean interop gpu-check gpu-wheels old-torch oldest loaders examples

demo: .make/zckpt .make/train
	$(BIN)/zckpt demo

test: .make/zckpt .make/test interop
	$(PYTEST)

# What `make test` does a systematic part of, whole: every request of every kind of run at an S3 server fails, in two ways; models
# are loaded by four ranks; every kind of run with device nvme; a fault in each room is found by its tests (tests/planted.py). Tests
# that do no more here are not run again (tests/proofs.py).
proofs: .make/zckpt .make/test interop .make/verl .make/automodel .make/megatron-bridge
	ZCKPT_PROOFS=1 $(PYTEST) -m proof

check: .make/zckpt .make/test .make/strict/built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/checkpoint.yml .github/ISSUE_TEMPLATE/other.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# Wheels for all platforms and the sdist, into dist/, without Docker; and what can be proved of them here.
wheels: .make/zckpt
	$(PYTHON) .ci/wheels.py
	$(PYTHON) .ci/check_wheels.py

# The same for this machine and this Python alone, in about two minutes.
wheels-here: .make/zckpt
	$(PYTHON) .ci/wheels.py --here --out .make/dist-here
	$(PYTHON) .ci/check_wheels.py --here --dist .make/dist-here

# The documentation as a site, in .make/site; a link that leads nowhere is an error.
docs: .make/zckpt .make/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
.make/docs: .make/zckpt
	$(PIP) mkdocs-material 'mkdocstrings[python]'
	@touch $@

# The engine, built to watch its own memory, arithmetic and threads, at all that it does.
sanitize: asan tsan
asan: .make/asan/built
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc $(BIN)/python tests/sanitized.py .make/asan/_core.*so
tsan: .make/tsan/built
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" TSAN_OPTIONS=halt_on_error=1 setarch -R $(BIN)/python tests/sanitized.py .make/tsan/_core.*so

# The trainer, live export and loading with the oldest torch that they take, in a second environment beside the first. Today's
# transformers is left out: it asks this torch, built for CUDA, for a stream, which ends a process on a machine without a GPU.
OLD_TORCH ?= 2.6.0
old-torch: .make/old-torch
	.venv-old/bin/python benchmarks/gpu_check.py --cpu --ranks 2 --only training offload nvme saves export live
	OMP_NUM_THREADS=1 .venv-old/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -q tests/runtime tests/live/test_device.py tests/test_drop_in.py
.make/old-torch: .make/test
	$(BIN)/python -m venv --clear .venv-old
	.venv-old/bin/pip --disable-pip-version-check install -q --no-compile --no-deps torch==$(OLD_TORCH) sympy==1.13.1
	.venv-old/bin/python tests/old_torch.py $(VENV)
	@touch $@

# A part of the tests with the oldest libraries that pyproject.toml allows, in a folder beside the environment.
OLDEST_TESTS := tests/runtime/test_config.py tests/runtime/test_start.py tests/cli/test_json.py \
  tests/distributed/test_pretrained.py tests/distributed/test_train.py tests/interop/test_peft.py \
  tests/interop/test_merge_lora.py
oldest: .make/oldest/ready
	PYTHONPATH=$(CURDIR)/.make/oldest $(PYTEST) $(OLDEST_TESTS)
.make/oldest/ready: .make/test pyproject.toml .ci/oldest.py
	rm -rf $(@D)
	$(BIN)/pip --disable-pip-version-check install -q --no-compile --target $(@D) $$($(BIN)/python .ci/oldest.py)
	$(BIN)/pip --disable-pip-version-check install -q --no-compile --no-deps --target $(@D) $$($(BIN)/python .ci/oldest.py alone)
	@touch $@

# Scripts of DeepSpeedExamples as they are, on the trainer, on two ranks of the CPU: EXAMPLES is a checkout of it.
EXAMPLES ?= ../DeepSpeedExamples
examples: .make/zckpt .make/test .make/trl .make/examples
	@test -d $(EXAMPLES)/training || { echo 'name a checkout of github.com/deepspeedai/DeepSpeedExamples: make examples EXAMPLES=DIR'; exit 1; }
	$(BIN)/python tests/deepspeed_examples.py $(EXAMPLES)
# What they need, each where it disturbs no other; DeepSpeed-Chat wants a transformers before 5.
.make/examples: .make/trl
	$(PIP) --no-deps --target $@.new/usual loguru==0.7.3 fire==0.7.1 sh==2.4.0 termcolor==3.3.0 pytz==2026.6
	$(PIP) --no-deps --target $@.new/vision torchvision==0.29.1
	$(VENV)/bin/pip --disable-pip-version-check install -q --no-compile --no-deps --target $@.new/chat \
	  transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2 datasets==4.4.2
	mv $@.new $@

# The loaders that users give outputs to: a step of RELEASE.md. The streamers of vLLM and SGLang lie beside the environment.
LOADER_TESTS := tests/interop/test_server_loaders.py tests/interop/test_loading.py tests/interop/test_hub_form.py \
  tests/interop/test_peft.py tests/interop/test_fp8.py tests/interop/test_gguf.py tests/interop/test_fixtures.py
loaders: .make/test interop .make/loaders
	PYTHONPATH=$(CURDIR)/.make/loaders $(PYTEST) $(LOADER_TESTS)
.make/loaders: .make/test
	$(PIP) --no-deps --target .make/loaders.new runai-model-streamer fastsafetensors humanize && mv .make/loaders.new $@

# TRL and the datasets that it needs, beside the environment: every Trainer would import them. dill takes for a library's module
# what lies in a folder of this name.
.make/trl: .make/test
	$(PIP) --no-deps --target .make/trl.new/site-packages trl datasets pyarrow dill multiprocess pandas && mv .make/trl.new $@

# verl's merger of rank files, without what the rest of verl needs: a second opinion, and a rival.
.make/verl:
	$(PIP) --no-deps --target .make/verl.new verl==0.9.1 && mv .make/verl.new $@

# NeMo AutoModel's consolidation of shards, without what the rest of it needs.
.make/automodel:
	$(PIP) --no-deps --target .make/automodel.new nemo_automodel==0.7.0 && mv .make/automodel.new $@

# Megatron Bridge's adapters, without what the rest of it needs.
.make/megatron-bridge:
	$(PIP) --no-deps --target .make/megatron-bridge.new megatron-bridge==0.3.1 && mv .make/megatron-bridge.new $@

# mergekit, without what the parts of it need that are not measured.
.make/mergekit:
	$(PIP) --no-deps --target .make/mergekit.new mergekit==0.1.5 immutables==0.21 && mv .make/mergekit.new $@

# mlx and mlx-lm, which run on CPUs too: the test of to-mlx compares with them, and fixtures/generate_mlx.py asks them.
.make/mlx:
	$(PIP) --no-deps --target .make/mlx.new mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2 && mv .make/mlx.new $@

# llm-compressor's model-free path, with what its package imports beside.
.make/llm-compressor:
	$(PIP) --no-deps --target $@.new llmcompressor==0.14.0.1 datasets pyarrow dill multiprocess pandas xxhash && mv $@.new $@

# llama.cpp's quantiser, as benchmarks/quantising.py calls it.
.make/llama:
	$(PIP) --no-deps --target $@.new llama-cpp-cffi==0.4.42
	echo 'void abort(void); void __cxa_call_terminate(void *e) { (void)e; abort(); }' | $(CC) -shared -fPIC -x c - -o $@.new/missing.so
	mv $@.new $@

bench: .make/zckpt .make/test interop .make/verl .make/mergekit .make/mlx .make/llm-compressor .make/llama
	$(BIN)/python benchmarks/run.py

# Checks and measures the trainer and live models on a machine with a GPU and torch: GPU_PYTHON is the Python that has it. What is
# missing beside torch comes from .make/wheels, which `make gpu-wheels` fills where there is a network, or else from the index.
GPU_PYTHON ?= python3
GPU_NEEDS := pydantic pydantic-core annotated-types typing-inspection typing-extensions typer click rich shellingham tqdm \
  huggingface_hub safetensors pyyaml filelock fsspec packaging requests scikit-build-core nanobind pathspec
GPU_PIP = $(GPU_PYTHON) -m pip --disable-pip-version-check
GPU_LACKS := import sys, importlib.metadata as m; have = {d.name.lower().replace("_", "-") for d in m.distributions()}; \
  print(*(name for name in sys.argv[1:] if name.replace("_", "-") not in have))
gpu-check:
	@mkdir -p .make/wheels
	@lacks=$$($(GPU_PYTHON) -c '$(GPU_LACKS)' $(GPU_NEEDS)); [ -z "$$lacks" ] || $(GPU_PIP) install -q --no-deps --upgrade \
	  --target .make/gpu --find-links .make/wheels $(if $(wildcard .make/wheels/*.whl),--no-index) $$lacks
	PYTHONPATH=.make/gpu $(GPU_PIP) install -q --no-deps --no-index --no-build-isolation --upgrade --target .make/gpu .
	PYTHONPATH=$(CURDIR)/.make/gpu $(GPU_PYTHON) benchmarks/gpu_check.py $(ARGS)

# For `make gpu-check` on a machine without a network, with the Python of this version.
GPU_VERSION ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version $(GPU_VERSION) -d .make/wheels $(GPU_NEEDS)

fixtures: .make/zckpt .make/test interop .make/mlx
	for script in fixtures/generate*.py; do $(BIN)/python $$script || exit 1; done

# Damages files of every kind in new ways each time: about FUZZ_EXAMPLES x 10 of them; then those that are read byte by byte, for
# FUZZ_SECONDS each, in whatever way reaches new code. What reached it is kept in .make/fuzz.
fuzz: .make/zckpt .make/test
	ZCKPT_FUZZ=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -q -n 2 tests/hostile/test_fuzz.py
	$(PIP) atheris
	for target in pickle zip safetensors metadata; do $(BIN)/python tests/hostile/coverage.py $$target -max_len=65536 -timeout=20 \
	  -rss_limit_mb=1500 -artifact_prefix=.make/fuzz/ -max_total_time=$(FUZZ_SECONDS) .make/fuzz/$$target || exit 1; done

golden: .make/zckpt .make/test
	ZCKPT_GOLDEN=rewrite $(BIN)/python -m pytest -q tests/cli tests/runtime/test_config_page.py

clean:
	rm -rf $(VENV) .venv-old .make build

# The package, built from zckpt/csrc; rebuilt when the C++ or the set-up changes.
.make/zckpt: pyproject.toml constraints.txt $(CORE)
	@mkdir -p .make
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core nanobind cmake ninja
	$(EDITABLE) .
	@$(BIN)/python -c 'import zckpt._core' || echo 'zckpt: the C++ engine was not built: the slow Python one will be used. What failed: pip install -v .'
	@touch $@

# The engine once more: every warning an error, and with sanitizers. What users install is built without, for a newer compiler has
# newer warnings.
.make/strict/built: OPTIONS = -DZCKPT_STRICT=ON
.make/asan/built: OPTIONS = -DZCKPT_TESTING=ON -DZCKPT_SANITIZE=address,undefined
.make/tsan/built: OPTIONS = -DZCKPT_TESTING=ON -DZCKPT_SANITIZE=thread
.make/%/built: .make/zckpt
	@mkdir -p $(@D)
	$(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(OPTIONS) > $(@D)/log
	$(BIN)/cmake --build $(@D)
	@touch $@

# What the trainer needs, and the demo shows. Where it will not install, the demo converts a stored checkpoint.
.make/train: .make/zckpt
	$(PIP) torch 'pydantic>=2' 'matplotlib>=3.7' || echo 'the trainer'"'"'s needs did not install: it will not be shown'
	@touch $@

# What the tests need: torch first and pinned, since others would pull it unpinned.
.make/test: .make/zckpt
	$(PIP) 'setuptools<81' torch
	$(EDITABLE) '.[test]'
	@touch $@

# DeepSpeed itself, for the tests against the real thing. A machine where it will not install still runs the others.
interop: .make/interop .make/megatron-core .make/trl
.make/interop: .make/test
	DS_ACCELERATOR=cpu $(PIP) --no-build-isolation deepspeed || echo 'deepspeed did not install: its tests will be skipped'
	@touch $@
# Megatron-Core, which loads and saves what zckpt writes; it needs torch and numpy only.
.make/megatron-core: .make/test
	$(PIP) --no-deps megatron-core
	@touch $@

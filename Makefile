# Two words to start with: `make demo` and `make test`. Each does all the set-up it needs; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install -q -c constraints.txt
CORE := $(wildcard zckpt/csrc/* CMakeLists.txt)

FUZZ_EXAMPLES ?= 3000

.PHONY: demo test fuzz check bench fixtures golden clean interop

demo: .make/zckpt .make/train
	$(BIN)/zckpt demo

test: .make/zckpt .make/test interop
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q

check: .make/zckpt .make/test .make/strict/built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/mypy

bench: .make/zckpt .make/test interop
	$(BIN)/python benchmarks/run.py

fixtures: .make/zckpt .make/test interop
	for script in fixtures/generate*.py; do $(BIN)/python $$script || exit 1; done

# Damages files of every kind in new ways each time: about FUZZ_EXAMPLES x 10 of them.
fuzz: .make/zckpt .make/test
	ZCKPT_FUZZ=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -q -n 2 tests/hostile/test_fuzz.py

golden: .make/zckpt .make/test
	ZCKPT_GOLDEN=rewrite $(BIN)/python -m pytest -q tests/cli tests/runtime/test_config_page.py

clean:
	rm -rf $(VENV) .make build

# The package, built from zckpt/csrc; rebuilt when the C++ or the set-up changes.
.make/zckpt: pyproject.toml constraints.txt $(CORE)
	@mkdir -p .make
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation -e .
	@$(BIN)/python -c 'import zckpt._core' || echo 'zckpt: the C++ engine was not built: the slow Python one will be used. What failed: pip install -v .'
	@touch $@

# The engine once more, every warning an error; `pip install` builds it without, for a newer compiler has newer warnings.
.make/strict/built: .make/zckpt
	$(BIN)/cmake -S . -B .make/strict -G Ninja -DCMAKE_BUILD_TYPE=Release -DZCKPT_STRICT=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > .make/strict.log
	$(BIN)/cmake --build .make/strict
	@touch $@

# What the trainer needs, and the demo shows. Where it will not install, the demo converts a stored checkpoint.
.make/train: .make/zckpt
	$(PIP) torch 'pydantic>=2' 'matplotlib>=3.7' || echo 'the trainer'"'"'s needs did not install: it will not be shown'
	@touch $@

# What the tests need: torch first and pinned, since others would pull it unpinned.
.make/test: .make/zckpt
	$(PIP) 'setuptools<81' torch
	$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

# DeepSpeed itself, for the tests against the real thing. A machine where it will not install still runs the others.
interop: .make/interop
.make/interop: .make/test
	DS_ACCELERATOR=cpu $(PIP) --no-build-isolation deepspeed || echo 'deepspeed did not install: its tests will be skipped'
	@touch $@

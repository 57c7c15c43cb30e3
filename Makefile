# Two commands: `make run` and `make test`. All targets: `make help`.
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
PROMPT ?=
ARGS ?=
WORKLOAD ?= build/bench/mixed.json

# $(value) keeps a $ in the text as it is; the environment needs no quoting.
export OCTAVO_MAKE_MODEL := $(value MODEL)
export OCTAVO_MAKE_HOST := $(value HOST)
export OCTAVO_MAKE_PORT := $(value PORT)
export OCTAVO_MAKE_PROMPT := $(value PROMPT)
export PYTHON

BIN := .venv/bin
SETUP := @sh tools/setup.sh
CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
CPP = $$(find csrc -name '*.cpp' -o -name '*.hpp')

.DEFAULT_GOAL := help
.PHONY: help run setup test quick conformance check lint types native sanitize format bench fuzz \
    clean

help: ## show this text
	@echo 'usage: make TARGET [VARIABLE=value]'
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

run: ## serve at http://127.0.0.1:8000 (MODEL, HOST, PORT, ARGS), or answer PROMPT="..." once
	$(SETUP)
	@if [ -n "$$OCTAVO_MAKE_PROMPT" ]; then \
	    exec $(BIN)/octavo chat "$$OCTAVO_MAKE_MODEL" --prompt="$$OCTAVO_MAKE_PROMPT" $(ARGS); \
	else \
	    exec $(BIN)/octavo serve "$$OCTAVO_MAKE_MODEL" \
	        --host="$$OCTAVO_MAKE_HOST" --port="$$OCTAVO_MAKE_PORT" $(ARGS); \
	fi

setup: ## make .venv, build and install Octavo, fetch the default model
	$(SETUP) --model smollm2-135m

test: ## set up and run the whole test suite (ARGS go to pytest)
	$(SETUP) --dev --model smollm2-135m
ifeq ($(CHROMIUM),)
	@echo 'test: left out the tests of the chat page in a browser: there is no Chromium here' >&2
endif
	@$(BIN)/python -m pytest $(if $(CHROMIUM),,-m "not browser") $(ARGS)

quick: ## the inner loop: tests under a minute, without the real model
	$(SETUP) --dev
	@$(BIN)/python -m pytest -q -m "not slow and not model and not browser" $(ARGS)

check: lint types native ## lint, formats, types, layer and size rules, warnings of the C++ build
	@$(BIN)/python -m pytest -q tests/house

lint:
	$(SETUP) --dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CPP)

types:
	$(SETUP) --dev
	@$(BIN)/mypy

native:
	$(SETUP) --dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/check -G Ninja --log-level=WARNING \
	    -DCMAKE_BUILD_TYPE=Release -DOCTAVO_WERROR=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python"
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/check -- --quiet

sanitize: ## kernels and sampler under AddressSanitizer and UBSan, on every level (ARGS)
	$(SETUP) --dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON="$(CURDIR)/$(BIN)/python" sh tools/sanitize.sh $(ARGS)

format: ## put Python and C++ into the form that check wants
	$(SETUP) --dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

bench: ## every benchmark, then a mixed workload end to end (MODEL, ARGS; WORKLOAD=FILE for another)
	$(SETUP) --model smollm2-135m
	@for part in kernels intensity paging scheduler batching sampling end_to_end; do \
	    printf '\n== %s\n' $$part; $(BIN)/python benchmarks/$$part.py || exit; done
	@printf '\n== mixed workload\n'
	@mkdir -p build/bench && $(BIN)/python benchmarks/mixed_workload.py > build/bench/mixed.json
	@$(BIN)/octavo bench throughput "$$OCTAVO_MAKE_MODEL" --workload $(WORKLOAD) $(ARGS)

fuzz: ## explore: the same properties with many more random examples
	$(SETUP) --dev
	@HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m "not model and not browser" $(ARGS)

conformance: ## structured output: 200 schemas, 100 outputs each, validated (ARGS)
	$(SETUP) --dev --model smollm2-135m
	@$(BIN)/python benchmarks/structured_output.py --model "$$OCTAVO_MAKE_MODEL" $(ARGS)

clean: ## remove .venv, build outputs and caches (the model cache stays)
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

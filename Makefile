# make demo    set up, fetch SmolLM2-135M-Instruct, compare every drafter with plain decoding
# make test    run the test suite
# make check   formatting, lints, types and the test suite
#
# Everything lives in .venv. TORCH is the requirement that is installed first, so that the range in
# pyproject.toml is met already and never pulls another build. With a CUDA GPU: make demo TORCH=torch

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.dev

.PHONY: demo test test-real check format clean

demo: $(READY)
	$(BIN)/outrider pull smollm2-135m-instruct
	$(BIN)/outrider bench --model smollm2-135m-instruct --prompts builtin --limit 8 \
	    --max-tokens 48 --repeats 1 \
	    --drafter none --drafter ngram:n=3,k=8 --drafter suffix:k=8 \
	    --drafter draft:smollm2-135m-instruct,k=4 \
	    --drafter draft:smollm2-135m-instruct,k=6,width=3 \
	    --drafter 'ensemble:[ngram:k=4,draft:smollm2-135m-instruct,k=4]'

test: $(DEV)
	$(BIN)/python -m pytest -m "not real"

test-real: $(DEV)
	$(BIN)/python -m pytest -m real

check: $(DEV)
	$(BIN)/ruff format --check src tests benchmarks hatch_build.py
	$(BIN)/ruff check src tests benchmarks hatch_build.py
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not real"

format: $(DEV)
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(DEV): $(READY)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

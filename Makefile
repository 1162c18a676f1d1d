# Every target sets itself up in .venv, from a lock file with exact versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSER := $(VENV)/.browser
export TRANSFORMERS_VERBOSITY := error
export HF_HUB_OFFLINE := 1

.PHONY: setup demo docs site examples check test test-fast test-wheel audit bench clean

setup: $(STAMP)

$(STAMP): requirements.lock requirements-nodeps.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "needlework: installing into $(VENV) (torch is the largest part, some 200 MB)"
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements-nodeps.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The report is tested in a real browser. Debian's Chromium, where there is apt; a clear word where there is not.
$(BROWSER): $(STAMP)
	@if test -x /usr/bin/chromium; then true; \
	elif command -v apt-get >/dev/null && test "$$(id -u)" = 0; then apt-get update -qq && apt-get install -y -qq chromium >/dev/null; \
	else echo "no /usr/bin/chromium and no apt as root: browser tests will be skipped"; fi
	touch $@

demo: $(STAMP)
	$(BIN)/needlework demo --out runs/demo

# README's picture and table, from the full demo; the log's tables of the zoo, from the cards.
docs: $(STAMP)
	$(BIN)/needlework demo --full --out runs/demo-full
	$(BIN)/python docs/figures.py runs/demo-full

# The documentation site, readable from disk: runs/site/index.html.
site: $(STAMP)
	$(BIN)/python docs/commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Run the notebooks of examples/ and store their outputs.
examples: $(STAMP)
	$(BIN)/python examples/run.py

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/ruff format --check src tests benchmarks docs examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tests that kill processes, drive a browser or measure memory disturb each other: they run alone, after the others.
test: $(BROWSER)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not serial"
	$(BIN)/python -m pytest -m serial
	NEEDLEWORK_TEST_DEVICE=emu $(BIN)/python -m pytest -n 2 --dist worksteal tests/laws/test_other_device.py

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow and not serial"

# The wheel as a user installs it: with the newest dependencies that it allows, outside of the repository. Needs an index.
test-wheel:
	$(PYTHON) tests/wheel/run.py

# Known holes in the locked packages and their licences (SECURITY.md). Offline, it says what it could not ask.
audit: $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 --timeout 10 --target $(VENV)/audit pip-audit 2>/dev/null
	PYTHONPATH=$(VENV)/audit $(BIN)/python tests/audit.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

